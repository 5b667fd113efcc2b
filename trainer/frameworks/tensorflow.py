"""TensorFlow's MultiWorkerMirroredStrategy: ``TF_CONFIG`` from the ranks and the addresses that they tell each other.

TensorFlow's own server listens on all addresses of its host, at the port told here, and trusts who reaches it; it has
no setting for either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import hold_ports, own_address
from trainer.frameworks.meeting import Meeting


def describe_workers(rank: int, workers: Sequence[str]) -> str:
    """Return the value of ``TF_CONFIG`` for one rank. ``workers``: HOST:PORT of each rank, in order; the first of them
    is the chief, which writes what only one writes. Pure."""
    return json.dumps({"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": rank}})


def prepare(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to run a rank with."""
    host = own_address(environment, facts.master_addr)
    with hold_ports(host) as [port]:  # until all have theirs: no two of one host get the same
        workers = meeting.gather(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return {"TF_CONFIG": describe_workers(facts.rank, workers)}

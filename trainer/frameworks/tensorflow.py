"""TensorFlow's MultiWorkerMirroredStrategy: ``TF_CONFIG`` from the ranks and the addresses that they tell each other.

TensorFlow's own server listens on all addresses of its host, at the port told here, and trusts who reaches it; it has
no setting for either.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import own_address
from trainer.comm.tf_config import TF_CONFIG, describe_workers
from trainer.frameworks.meeting import Meeting


def variables(facts: RankFacts, workers: Sequence[str]) -> dict[str, str]:
    """Return the variables of one rank. ``workers``: HOST:PORT of each rank, in order. Pure."""
    return {TF_CONFIG: describe_workers(facts.rank, workers)}


def prepare(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to run a rank with."""
    host = own_address(environment, facts.master_addr)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:  # until all have theirs: no two of one host get the same
        held.bind((host, 0))
        place = f"[{host}]" if family == socket.AF_INET6 else host
        workers = meeting.gather(f"{place}:{held.getsockname()[1]}")
    return variables(facts, workers)

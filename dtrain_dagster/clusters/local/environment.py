"""The environment variables that a process of a job gets."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from dtrain_dagster.clusters.local.gpus import VISIBLE, share_gpus, visible_gpus
from dtrain_dagster.clusters.local.processes import MARK
from trainer.comm.launch_secret import SECRET_FILE
from trainer.exit_codes import RELEASES_NODES

PEER_GRACE = "DTRAIN_PEER_GRACE_SECONDS", 10.0
"""Variable and default: seconds that the peers of a failed process have to notice the failure and log it."""
STOP_GRACE = "DTRAIN_STOP_GRACE_SECONDS", 8.0
"""Variable and default: seconds between SIGTERM and SIGKILL, the time for a checkpoint."""
_OF_A_LAUNCH = ("DTRAIN_LAUNCH", "DTRAIN_INCARNATION", RELEASES_NODES, SECRET_FILE)


class LaunchError(ValueError):
    """The requested launch cannot be started. The message names the setting and the remedy."""


def read_duration(name: str, default: float, *environments: Mapping[str, str]) -> float:
    """Return the seconds that the first environment with this variable holds, else ``default``. Raise `LaunchError` for
    a value that is not such a number."""
    text = next(filter(None, (environment.get(name) for environment in environments)), str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise LaunchError(f"{name}={text!r} must be a number of seconds, such as {default:g}")
    return seconds


def choose_port(wanted: int | None) -> int:
    """Return a free port of this machine: the wanted one, or any. Raise `LaunchError` if the wanted one is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise LaunchError(
                f"master port {wanted} cannot be used on this machine ({error.strerror}): choose another "
                "(training.master_port), or leave it out and a free one is taken"
            ) from error
        return probe.getsockname()[1]


def node_mark(launch: Mapping[str, Any], node_id: int, incarnation: int) -> str:
    """Return the mark of all processes of one incarnation of a node, see
    `dtrain_dagster.clusters.local.processes.MARK`."""
    return f"{launch['token']}-l{launch['launch']}-n{node_id}-s{incarnation}-"


def rank_environment(
    launch: Mapping[str, Any], node_id: int, local_rank: int, port: int, incarnation: int = 1, secret: str = ""
) -> dict[str, Any]:
    """Return torchrun's variables for one process; for a process that regroups, also the launch and the incarnation.
    ``secret``: the path of the file with this launch's secret."""
    per_node, count = launch["processes_per_node"], launch["node_count"]
    of_launch = {"DTRAIN_LAUNCH": launch["launch"], "DTRAIN_INCARNATION": incarnation, RELEASES_NODES: 1}
    elastic = of_launch if launch["elastic"] else {}
    return {
        "RANK": node_id * per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "NODE_RANK": node_id,
        "GROUP_RANK": node_id,
        "WORLD_SIZE": count * per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PYTHONUNBUFFERED": 1,
        MARK: node_mark(launch, node_id, incarnation),
        **({SECRET_FILE: secret} if secret else {}),
        **elastic,
    }


def merge_environment(
    inherited: Mapping[str, str], launch: Mapping[str, Any], variables: Mapping[str, Any]
) -> dict[str, str]:
    """Return the environment of a process. Later sources win: defaults, the submitter's environment, the setting for
    threads, its GPUs of this machine, the job's own variables, its place in the world."""
    ranks = launch["node_count"] * launch["processes_per_node"]
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),  # or every rank takes all cores
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",  # all nodes are on this machine
    }
    threads = {"OMP_NUM_THREADS": str(launch["threads_per_rank"])} if launch["threads_per_rank"] else {}
    places = {name: str(value) for name, value in variables.items()}
    # A job may be submitted from within another: that one's launch is not this one's.
    outer = {name: value for name, value in inherited.items() if name not in _OF_A_LAUNCH}
    gpus = visible_gpus(outer)
    mine = share_gpus(gpus, int(variables["NODE_RANK"]), launch["node_count"], launch["processes_per_node"])
    devices = {VISIBLE: ",".join(mine)} if gpus else {}
    return {**defaults, **outer, **threads, **devices, **launch["env"], **places}

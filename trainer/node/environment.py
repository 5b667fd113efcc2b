"""The environment variables that a process of a job gets.

Its place in the world, its GPUs and threads belong here; how a cluster describes a launch does not.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.comm.launch_secret import SECRET_FILE
from trainer.comm.own_address import HOST, LOOPBACK
from trainer.node.gpus import VISIBLE, share_gpus, visible_gpus
from trainer.node.processes import MARK
from trainer.runtime.launch import LAUNCH_VARIABLE, ORDER, Launch

STOP_GRACE = "DTRAIN_STOP_GRACE_SECONDS", 8.0
"""Variable and default: seconds between SIGTERM and SIGKILL, the time for a checkpoint; and for the peers of a failed
process to notice the failure and log it, before they get SIGTERM."""
_OF_A_LAUNCH = (LAUNCH_VARIABLE, ORDER, SECRET_FILE)


class LaunchError(ValueError):
    """The requested launch cannot be started. The message names the setting and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of one incarnation of a node in its launch."""

    node_id: int
    incarnation: int = 1
    host: str = LOOPBACK
    """The address under which other nodes reach it."""
    master_addr: str = LOOPBACK
    """The address of the node with rank 0. Processes that regroup find each other in storage; it then only tells which
    network they use."""
    master_port: int = 0
    secret: str = ""
    """The path of the file with this launch's secret."""
    is_alone: bool = False
    """Whether a scheduler has given it a machine, or a share of one, of its own; else all nodes of the launch are this
    machine, and divide it."""


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
    """Return the mark of all processes of one incarnation of a node, see `trainer.node.processes.MARK`."""
    return f"{launch['token']}-l{launch['launch']}-n{node_id}-s{incarnation}-"


def rank_environment(launch: Mapping[str, Any], seat: Seat, local_rank: int) -> dict[str, Any]:
    """Return torchrun's variables for one process, and its launch."""
    per_node, count, node_id = launch["processes_per_node"], launch["node_count"], seat.node_id
    is_elastic = bool(launch["elastic"])
    told = Launch(
        number=launch["launch"], incarnation=seat.incarnation, is_elastic=is_elastic, releases_nodes=is_elastic
    )
    return {
        "RANK": node_id * per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "NODE_RANK": node_id,
        "GROUP_RANK": node_id,
        "WORLD_SIZE": count * per_node,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": seat.master_port,
        **({HOST: seat.host} if seat.is_alone else {}),
        "PYTHONUNBUFFERED": 1,
        MARK: node_mark(launch, node_id, seat.incarnation),
        **({SECRET_FILE: seat.secret} if seat.secret else {}),
        **told.variables(),
    }


def merge_environment(
    inherited: Mapping[str, str], launch: Mapping[str, Any], seat: Seat, variables: Mapping[str, Any]
) -> dict[str, str]:
    """Return the environment of a process. Later sources win: defaults, the environment of the process that starts it,
    the setting for threads, its GPUs of this machine, the job's own variables, its place in the world."""
    nodes_here = 1 if seat.is_alone else launch["node_count"]
    ranks = nodes_here * launch["processes_per_node"]
    defaults = {"OMP_NUM_THREADS": str(max(1, _usable_cores(seat) // ranks))}  # or every rank takes all cores
    if not seat.is_alone:
        defaults["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"  # all nodes are on this machine
    threads = {"OMP_NUM_THREADS": str(launch["threads_per_rank"])} if launch["threads_per_rank"] else {}
    places = {name: str(value) for name, value in variables.items()}
    # A job may be submitted from within another: that one's launch is not this one's.
    outer = {name: value for name, value in inherited.items() if name not in _OF_A_LAUNCH}
    gpus = visible_gpus(outer)
    here = 0 if seat.is_alone else seat.node_id
    mine = share_gpus(gpus, here, nodes_here, launch["processes_per_node"])
    # Too few GPUs of this machine are left aside, and its user was told (`explain_local_gpus`); of a machine that was
    # asked for its GPUs, ranks see them all, and refuse to share one.
    devices = {} if not gpus or (seat.is_alone and not mine) else {VISIBLE: ",".join(mine)}
    return {**defaults, **outer, **threads, **devices, **launch["env"], **places}


def _usable_cores(seat: Seat) -> int:
    """Return the cores for all ranks on this machine: those that a scheduler has bound the node to, else all."""
    if seat.is_alone and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

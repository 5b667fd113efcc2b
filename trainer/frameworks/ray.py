"""Ray Train: a Ray of the job's own over its nodes, and the program once, on the first of them.

The first process of each node starts a node of that Ray; the others only wait. All of it ends with the program. It has
no dashboard, listens on loopback where all nodes are on this machine, and has a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import is_loopback, own_address
from trainer.errors import ConfigError
from trainer.frameworks.child import Child
from trainer.frameworks.meeting import Meeting, MeetingError
from trainer.frameworks.ray_node import RayNode

NAME_PREFIX = "dtrain-ray-"
LEAVE_SECONDS = 30.0
"""The seconds that the other processes wait for the first one to have ended, so that it is seen to end first."""
STORE_BYTES = 200 * 2**20
"""Ray's object store where several nodes share this machine; elsewhere Ray takes 30 % of the memory, as it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayHead:
    """Where the head of a job's Ray is."""

    address: str
    """HOST:PORT."""
    folder: str
    """Its folder, which nodes of the same machine share."""


def node_options(host: str, cpus: int, is_shared: bool) -> list[str]:
    """Return the options of ``ray start`` that all nodes have. ``is_shared``: whether other nodes of the job are on
    this machine. Pure."""
    return [
        *("--block", "--disable-usage-stats", "--node-ip-address", host, "--num-cpus", str(cpus)),
        *(["--object-store-memory", str(STORE_BYTES)] if is_shared else []),
    ]


def head_options(host: str, port: int, folder: str) -> list[str]:
    """Return the options of ``ray start`` for the head, beside those of each node. Pure."""
    return ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", folder]


def script_variables(head: RayHead, facts: RankFacts) -> dict[str, str]:
    """Return the variables of the program: where its Ray is, and how many workers fill it. torchrun's are taken away
    (`WITHOUT`): Ray Train gives each worker its own. Pure."""
    return {
        "RAY_ADDRESS": head.address,
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": head.folder,
        "DTRAIN_RAY_NODES": str(facts.world_size // facts.local_world_size),
    }


WITHOUT = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of torchrun, which neither Ray's processes nor the program are to find."""


def run(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str], command: Sequence[str]) -> int:
    """Run the program on the first node, and return its exit code on every one."""
    if facts.local_rank:
        meeting.gather("")
        meeting.gather("")
        return _wait(meeting)
    host = own_address(environment, facts.master_addr)
    plain = {name: value for name, value in environment.items() if name not in WITHOUT and not name.startswith("RAY_")}
    nodes = facts.world_size // facts.local_world_size
    options = node_options(host, cpus_of(facts, host), is_loopback(host) and nodes > 1)
    folder = tempfile.mkdtemp(prefix=NAME_PREFIX) if facts.rank == 0 else ""
    try:
        if facts.rank:
            head = _head_of(meeting.gather("")[0])
            folder = head.folder
            with RayNode(["--address", head.address, *options], plain) as node:
                meeting.gather(node.wait_until_ready())
                return _wait(meeting)
        port = free_port(host)
        with RayNode([*head_options(host, port, folder), *options], plain) as node:
            head = RayHead(address=f"{host}:{port}", folder=folder)
            failed = node.wait_until_ready()
            meeting.gather(f"{head.address} {head.folder}")
            if why := [text for text in [failed, *meeting.gather(failed)] if text]:
                meeting.tell("1")
                raise ConfigError(f"the Ray of this job does not start: {why[0]}")
            code = Child(command, {**plain, **script_variables(head, facts)}).wait()
            meeting.tell(str(code))
        return code
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def cpus_of(facts: RankFacts, host: str) -> int:
    """Return the CPUs that a node offers to Ray's workers: its share of this machine's, at least one for each process
    of dtrain."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = facts.world_size // facts.local_world_size if is_loopback(host) else 1
    return max(facts.local_world_size, usable // here, 1)


def free_port(host: str) -> int:
    """Return a free port at an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _head_of(said: str) -> RayHead:
    address, _, folder = said.partition(" ")
    if (
        not address
        or Path(folder).parent != Path(tempfile.gettempdir())
        or not Path(folder).name.startswith(NAME_PREFIX)
    ):
        # It is removed here in the end.
        raise ConfigError(f"rank 0 has its Ray in {folder!r}, no folder of {tempfile.gettempdir()}: set TMPDIR alike")
    return RayHead(address=address, folder=folder)


def _wait(meeting: Meeting) -> int:
    """Wait for the end of the program, and return its exit code after it has ended."""
    try:
        code = int(meeting.hear())
    except MeetingError as error:
        raise MeetingError(f"the process that runs the program has ended: {error}") from error
    meeting.wait_for_end(LEAVE_SECONDS)
    return code

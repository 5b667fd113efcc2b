"""Ray Train: a Ray of the job's own over its nodes, and the program once, on the first of them.

The first process of each node starts a node of that Ray; the others only wait. Where all nodes of the job are on one
machine, as on the local cluster, there is one node of Ray, which listens on loopback only. It has no dashboard, asks
for a token that only this launch knows, has a folder of its own, and ends with the program.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import is_loopback, own_address
from trainer.errors import ConfigError
from trainer.exit_codes import EVICTED
from trainer.frameworks.child import Child
from trainer.frameworks.meeting import Meeting, MeetingError
from trainer.frameworks.ray_node import RayNode

NAME_PREFIX = "dtrain-of-ray-"
LEAVE_SECONDS = 600.0
"""The seconds that the other processes wait for the first one to have ended, so that it is seen to end first. It ends
its Ray before, which takes a minute on a busy machine."""
MOST_LETTERS = 20
"""The longest path of a folder for Ray's: a socket in it has some 80 letters more, and 107 are allowed."""
POLL_SECONDS, HURRY_SECONDS = 0.2, 1.0
AGENT_PORT = "dashboard-agent-listen-port"
VISIBLE = "CUDA_VISIBLE_DEVICES"
OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of torchrun, which neither Ray's processes nor the program are to find: Ray Train gives each worker its
own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayHead:
    """Where the head of a job's Ray is."""

    address: str
    """HOST:PORT."""
    folder: str
    """Its folder, by the same path on all machines."""
    token: str
    """What every connection has to give; empty where all know it by the launch's secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where a rank of the job is, as it tells the others."""

    host: str
    gpus: str
    """Its CUDA_VISIBLE_DEVICES; empty where that is not set."""


def share_machine(places: Sequence[RankPlace]) -> bool:
    """Return whether all ranks are on one machine that nobody else is to reach. Pure."""
    return all(is_loopback(place.host) for place in places)


def join_gpus(places: Sequence[RankPlace]) -> str:
    """Return the GPUs of all ranks of one machine, each once, as CUDA_VISIBLE_DEVICES has them. Pure."""
    return ",".join(dict.fromkeys(gpu for place in places for gpu in place.gpus.split(",") if gpu))


def node_options(host: str, cpus: int) -> list[str]:
    """Return the options of ``ray start`` that all nodes have. Pure."""
    return ["--block", "--disable-usage-stats", "--node-ip-address", host, "--num-cpus", str(cpus)]


def head_options(ports: Mapping[str, int], folder: str) -> list[str]:
    """Return the options of ``ray start`` for the head, beside those of each node. ``ports``: option → a free port; of
    a default, the second Ray of a machine would find the first one's. Pure."""
    chosen = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    return ["--head", *chosen, "--include-dashboard", "false", "--temp-dir", folder]


def ray_variables(token: str, is_one_machine: bool) -> dict[str, str]:
    """Return the variables of every process of the job's Ray, its program included. Pure."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        # As on Windows and macOS, where Ray stays on loopback: else it listens on all addresses of the host.
        **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if is_one_machine else {}),
    }


def run(
    facts: RankFacts, meeting: Meeting, environment: Mapping[str, str], command: Sequence[str], secret: LaunchSecret
) -> int:
    """Run the program on the first node, and return its exit code on every one."""
    host = own_address(environment, facts.master_addr)
    mine = RankPlace(host=host, gpus=environment.get(VISIBLE, ""))
    places = [RankPlace(**json.loads(said)) for said in meeting.gather(json.dumps(asdict(mine)))]
    one_machine = share_machine(places)
    plain = {name: value for name, value in environment.items() if name not in OF_TORCHRUN and name[:4] != "RAY_"}
    if facts.rank == 0:
        return _lead(facts, meeting, plain, command, secret, host, places, one_machine)
    head = RayHead(**json.loads(meeting.gather("")[0]))
    if one_machine or facts.local_rank:
        meeting.gather("")
        return _wait(meeting)
    plain |= ray_variables(head.token or token_of(secret), one_machine)
    ports = [f"--{AGENT_PORT}", str(free_ports(host, (AGENT_PORT,))[AGENT_PORT])]
    try:
        with RayNode(["--address", head.address, *ports, *node_options(host, cpus_of(facts, False))], plain) as node:
            meeting.gather(node.wait_until_ready())
            return _wait(meeting)
    finally:
        if Path(head.folder).name.startswith(NAME_PREFIX):
            shutil.rmtree(head.folder, ignore_errors=True)


def _lead(
    facts: RankFacts, meeting: Meeting, plain: dict[str, str], command: Sequence[str], secret: LaunchSecret,
    host: str, places: Sequence[RankPlace], one_machine: bool,
) -> int:  # fmt: skip
    """Start the head, wait for the others, run the program, and return its exit code; as rank 0."""
    own_token = "" if secret.is_given else secrets.token_hex(32)
    plain |= ray_variables(own_token or token_of(secret), one_machine)
    if one_machine and (gpus := join_gpus(places)):
        plain[VISIBLE] = gpus
    ports = free_ports(host, ("port", "ray-client-server-port", AGENT_PORT))
    folder = tempfile.mkdtemp(prefix=NAME_PREFIX, dir=folder_of_folders(tempfile.gettempdir()))
    head = RayHead(address=f"{host}:{ports['port']}", folder=folder, token=own_token)
    try:
        options = [*head_options(ports, folder), *node_options(host, cpus_of(facts, one_machine))]
        with RayNode(options, plain) as node:
            failed = node.wait_until_ready()
            meeting.gather(json.dumps(asdict(head)))
            if why := next(filter(None, [failed, *meeting.gather(failed)]), None):
                raise ConfigError(f"the Ray of this job does not start: {why}")
            child = Child(command, {**plain, "RAY_ADDRESS": head.address})
            while (code := child.poll()) is None:
                if why := node.explain_end():  # the program would wait for it for ever
                    child.kill()
                    if child.was_asked:
                        node.end(HURRY_SECONDS)
                        return EVICTED
                    raise MeetingError(f"the Ray of this job has ended before its program: {why}")
                time.sleep(POLL_SECONDS)
            meeting.tell(str(code))
            if child.was_asked:  # the cluster kills this process soon, and its folder would stay
                node.end(HURRY_SECONDS)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def folder_of_folders(wanted: str) -> str:
    """Return where Ray's folder is made: the usual place for temporary files, unless the paths of sockets in it would
    be longer than the system allows, which Ray notices only once it runs. Pure."""
    return wanted if len(wanted) <= MOST_LETTERS else "/tmp"


def token_of(secret: LaunchSecret) -> str:
    """Return the token of a launch's Ray, which all ranks compute."""
    return secret.key("ray").hex()


def cpus_of(facts: RankFacts, is_one_machine: bool) -> int:
    """Return the CPUs that a node of Ray offers to workers: those that this process may use, and one at least for each
    process of dtrain that it stands for."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(facts.world_size if is_one_machine else facts.local_world_size, usable)


def free_ports(host: str, names: Sequence[str]) -> dict[str, int]:
    """Return a free port at an address of this machine for each name."""
    with ExitStack() as stack:  # held until all are found, so that no two are the same
        found = {}
        for name in names:
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            found[name] = int(probe.getsockname()[1])
    return found


def _wait(meeting: Meeting) -> int:
    """Wait for the end of the program, and return its exit code after it has ended."""
    try:
        code = int(meeting.hear())
    except MeetingError as error:
        raise MeetingError(f"the process that runs the program has ended: {error}") from error
    meeting.wait_for_end(LEAVE_SECONDS)
    return code

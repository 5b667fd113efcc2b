"""Measure the control plane at 8, 128 and 256 nodes: the agreement on members after a loss, and its storage traffic.

Run `python -m benchmarks.control_plane`. Each node is a process of this machine with the real `DynamicRendezvous`
(failure detector, membership, its look at the storage); only the group that would sum gradients is left out, so no
model is trained, and a thread of the node gives its heartbeats instead of a process beside it. Nodes vanish by SIGKILL,
one or sixteen at once, and are then replaced by newcomers. All nodes share the cores of this machine, so the seconds
contain the work of all of them.

    sizes           by number of nodes:
    regroup_1, _16  seconds from when the first survivor knows of the loss of one or sixteen until the last survivor is
                    in the next generation: p50, and count, the number of losses
    storage_max     the most operations on the storage of a member from the loss until then; ``storage_mean``: of all
    load_after      load of the machine after each size
    failed          sizes that could not be measured, and the reasons
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import trainer.elastic.dynamic_rendezvous as rendezvous_module
from benchmarks.host import in_parts, note, options_of, stop_on_signals, tell
from trainer.comm.group import GroupError
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import rank_facts
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.elastic.failure_detector import FailureDetector
from trainer.elastic.generation import Generation
from trainer.rundir import RunDir
from trainer.runtime.launch import Launch
from trainer.storage.base import Storage

SIZES = (8, 128, 256)
LIMIT_SECONDS = 120.0
"""Seconds after which a step of the benchmark that has not come has failed."""
CALM_SECONDS = 4.0
"""Seconds of rest before nodes vanish, so that all connections of a new generation are there."""


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    def count(storage: CountedStorage, *given: Any) -> Any:
        storage.operations += 1
        return method(storage, *given)

    return count


class CountedStorage(Storage):
    """A storage that counts the operations that a remote one would bill."""

    operations = 0
    read, read_bounded, size = _counted(Storage.read), _counted(Storage.read_bounded), _counted(Storage.size)
    write, create, names = _counted(Storage.write), _counted(Storage.create), _counted(Storage.names)


class CallableOff:
    """In the place of a group of ranks: it can be called off, and moves no data."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.error: GroupError | None = None
        self.failed_at = 0.0
        self.called_off = threading.Event()

    def fail(self, message: str, communication: bool = True) -> None:
        """Keep the first reason, and wake the member."""
        if self.error is None:
            self.failed_at = time.monotonic()
            self.error = GroupError(message, communication=communication)
            self.called_off.set()

    def close(self) -> None:
        """Do nothing: there are no connections."""


def _world_without_sums(generation: Generation, member: str, facts: Any, device: Any, listener: Any, *_: Any) -> World:
    rank = generation.rank_of(member)
    assert rank is not None
    listener.close()
    group: Any = CallableOff(rank, len(generation.members))
    return World(facts, device, "gloo", generation.number, group)


def _detector_on_a_thread(
    me: str,
    secret: LaunchSecret,
    job: str,
    host: str,
    source: str,
    config: DistributedTrainingConfig,
    on_change: Callable[[], None],
) -> FailureDetector:
    return FailureDetector(
        me,
        secret.key("peers", job),
        host,
        config.health_check_seconds,
        config.peer_timeout_seconds,
        None,
        on_change,
        config.adaptive_detection,
    )


@dataclass
class Member:
    """The life of one node's process."""

    node: int
    planned: int
    folder: str
    pipe: int

    def live(self) -> None:
        """Join the first generation, and each later one when the present one is called off."""
        rendezvous_module.form_world = _world_without_sums  # type: ignore[assignment]
        rendezvous_module.PeerWatch = _detector_on_a_thread  # type: ignore[assignment,misc]
        config = DistributedTrainingConfig(world_size=self.planned, threads_per_rank=1)
        environment = {
            "RANK": str(self.node),
            "WORLD_SIZE": str(self.planned),
            "NODE_RANK": str(self.node),
            **Launch(is_elastic=True).variables(),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_PORT": "1",
            "DTRAIN_HOST": "127.0.0.1",
        }
        rundir = RunDir(self.folder)
        storage = rundir.storage = CountedStorage(self.folder)
        own = rendezvous_module.DynamicRendezvous(
            rundir, config, rank_facts(environment, config), torch.device("cpu"), environment, "job"
        )
        own.announce()
        reason, step, failed_at, before = "", 0, 0.0, 0
        while True:
            world = own.next_world(lambda: None, step=step, reason=reason)
            formed_at = time.monotonic()
            assert own.generation is not None
            number, size = own.generation.number, len(own.generation.members)
            own.has_state_of = number
            spent = storage.operations - before
            self.say(number=number, size=size, at=formed_at, failed_at=failed_at, storage=spent)
            group: Any = world.group
            while not group.called_off.wait(0.05 if world.rank == 0 else 60.0):
                if world.rank == 0 and own.recovery_reason:
                    group.fail(own.recovery_reason, communication=False)
            step, reason, failed_at, before = step + 1, str(group.error), group.failed_at, storage.operations

    def say(self, **fields: Any) -> None:
        """Write a line to the benchmark, shorter than what a pipe takes in one piece."""
        os.write(self.pipe, json.dumps({"node": self.node, "pid": os.getpid(), **fields}).encode()[:4000] + b"\n")


@dataclass
class Crowd:
    """Processes of members, forked from this one, and what they say."""

    planned: int
    folder: str
    pids: dict[int, int] = field(default_factory=dict)
    """The process of each node."""
    said: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._from, self._into = os.pipe()
        os.set_blocking(self._from, False)
        self._rest = b""

    def start(self, nodes: Sequence[int]) -> None:
        """Fork the processes of these nodes, which begin together."""
        waiting, go = os.pipe()
        for node in nodes:
            pid = os.fork()
            if pid == 0:
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the benchmark
                    for number in (signal.SIGTERM, signal.SIGINT):
                        signal.signal(number, signal.SIG_DFL)
                    os.close(self._from)
                    os.close(go)
                    os.read(waiting, 1)  # until the other end is closed
                    Member(node, self.planned, self.folder, self._into).live()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            self.pids[node] = pid
        os.close(waiting)
        os.close(go)

    def read(self, seconds: float) -> None:
        """Take in what has been said, for at most that long."""
        if not select.select([self._from], [], [], seconds)[0]:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._from, 1 << 20):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.said += [json.loads(line) for line in lines]

    def rest(self, seconds: float) -> None:
        """Let them be for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.read(left)

    def newest(self) -> dict[int, dict[str, Any]]:
        """Return the last word on the generation of each living process, by process."""
        alive = set(self.pids.values())
        return {item["pid"]: item for item in self.said if item["pid"] in alive}

    def wait_for_all(self, after: int, what: str) -> list[dict[str, Any]]:
        """Wait until all that live are in one generation of exactly them, later than ``after``; return their words.
        Raise TimeoutError after `LIMIT_SECONDS`."""
        until = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < until:
            found = list(self.newest().values())
            one = {(item["number"], item["size"]) for item in found}
            if len(found) == len(self.pids) and [size for _, size in one] == [len(found)] and min(one)[0] > after:
                return found
            self.read(0.2)
        raise TimeoutError(f"{what} did not come within {LIMIT_SECONDS:g} s; the last words: {self.said[-5:]}")

    def kill(self, nodes: Sequence[int]) -> None:
        """Kill the processes of these nodes at once."""
        gone = [self.pids.pop(node) for node in nodes]
        for pid in gone:
            os.kill(pid, signal.SIGKILL)
        for pid in gone:
            os.waitpid(pid, 0)

    def close(self) -> None:
        """End all processes."""
        self.kill(list(self.pids))
        os.close(self._from)
        os.close(self._into)


def measure(nodes: int, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Return the figures of one number of nodes."""
    folder = tempfile.mkdtemp(prefix="control-plane-")
    crowd, chance = Crowd(nodes, folder), random.Random(seed)
    figures: dict[str, Any] = {}
    try:
        crowd.start(range(nodes))
        crowd.wait_for_all(0, "the first generation")
        for count in (1, 16):
            if count < nodes:
                figures[f"regroup_{count}"] = _regroups(crowd, count, rounds, chance)
                note(f"{nodes} nodes, {count} vanish: {figures[f'regroup_{count}']}")
    finally:
        crowd.close()
        shutil.rmtree(folder, ignore_errors=True)
    return figures | {"load_after": round(os.getloadavg()[0], 2)}


def _regroups(crowd: Crowd, count: int, rounds: int, chance: random.Random) -> dict[str, Any]:
    """Kill so many at once, again and again, and replace them each time."""
    seconds: list[float] = []
    operations: list[int] = []
    for _ in range(rounds):
        crowd.rest(CALM_SECONDS)
        crowd.said = list(crowd.newest().values())
        last = crowd.said[0]["number"]
        lost = chance.sample(sorted(crowd.pids), count)
        crowd.kill(lost)
        formed = crowd.wait_for_all(last, f"the generation without {count}")
        seconds.append(max(item["at"] for item in formed) - min(item["failed_at"] for item in formed))
        operations += [item["storage"] for item in formed]
        number = formed[0]["number"]
        crowd.start(lost)
        crowd.wait_for_all(number, f"the generation with {count} newcomers")
        note(f"  {seconds[-1]:.3f} s (generation {last} to {number})")
    regrouped = {"p50": round(statistics.median(seconds), 3), "count": len(seconds)}
    return {**regrouped, "storage_mean": round(statistics.mean(operations), 2), "storage_max": max(operations)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a size could not be measured, else 0."""
    parser = options_of("control_plane", __doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES), help="numbers of nodes (8 128 256)")
    parser.add_argument("--rounds", type=int, default=4, help="losses of each size (4)")
    options = parser.parse_args(arguments)
    stop_on_signals()
    torch.set_num_threads(1)
    gc.freeze()
    sizes = {str(nodes): lambda nodes=nodes: {str(nodes): measure(nodes, options.rounds)} for nodes in options.nodes}
    measured, failed = in_parts(sizes)
    tell("control_plane", {"sizes": measured, **({"failed": failed} if failed else {})}, options.save)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Measure the control plane at 8, 32, 128 and 256 nodes: the agreement on members, failure detection, storage traffic,
and the supervisor's look.

Run `python -m benchmarks.control_plane --nodes 8 32 128 256`. Each node is a process of this machine with the real
`DynamicRendezvous` (failure detector, membership, its look at the storage); only the group that would sum gradients is
left out, so no model is trained, and a thread of the node gives its heartbeats instead of a process beside it. Nodes
vanish by SIGKILL, one or sixteen at once, and are then replaced by newcomers. A frozen node gets SIGSTOP. All nodes
share the cores of this machine, so the seconds contain the work of all of them, and
from 256 nodes a core on they beat less often (``beat_seconds``), which delays the detection of frozen nodes alone.

    start_seconds            from the start of the processes to the last member of the first generation
    detect_killed_seconds    from SIGKILL until the first survivor knows of the loss, the median
    detect_frozen_seconds    the same from SIGSTOP
    regroup_1, regroup_16    seconds from that until the last survivor is in the next generation: p50, p95 and their
                             count; storage_mean, storage_max: operations of a member from the loss until then
    join                     seconds from the start of the newcomers to the last member of the generation with them
    messages_per_second      lines that a member sends at rest, mean and max (beats and their answers)
    storage_per_second       storage operations of a member at rest, the mean
    supervisor_look_seconds  of one look of the supervisor at that many nodes of an engine, all running: the median
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

import trainer.elastic.dynamic_rendezvous as rendezvous_module
from benchmarks.control_plane_supervisor import measure_supervisor
from benchmarks.host import note, stop_on_signals, tell
from trainer.comm.group import GroupError
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import rank_facts
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.elastic.failure_detector import FailureDetector
from trainer.elastic.generation import Generation
from trainer.rundir import RunDir
from trainer.storage.base import Storage

SIZES = (8, 32, 128, 256)
REST_SECONDS = 10.0
LIMIT_SECONDS = 120.0
"""Seconds after which a step of the benchmark that has not come has failed."""
CALM_SECONDS = 4.0
"""Seconds of rest before nodes vanish, so that all connections of a new generation are there."""


class CountedStorage(Storage):
    """A storage that counts the operations that a remote one would bill."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.operations = 0

    def read(self, name: str) -> bytes:
        self.operations += 1
        return super().read(name)

    def read_bounded(self, name: str, most_bytes: int) -> bytes:
        self.operations += 1
        return super().read_bounded(name, most_bytes)

    def size(self, name: str) -> int:
        self.operations += 1
        return super().size(name)

    def write(self, name: str, data: bytes) -> None:
        self.operations += 1
        super().write(name, data)

    def create(self, name: str, data: bytes) -> str | None:
        self.operations += 1
        return super().create(name, data)

    def names(self, folder: str = "") -> Iterator[str]:
        self.operations += 1
        return super().names(folder)


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
    beat_seconds: float

    def live(self) -> None:
        """Join the first generation, and each later one when the present one is called off."""
        rendezvous_module.form_world = _world_without_sums  # type: ignore[assignment]
        rendezvous_module.PeerWatch = _detector_on_a_thread  # type: ignore[assignment,misc]
        config = DistributedTrainingConfig(
            world_size=self.planned, threads_per_rank=1, health_check_seconds=self.beat_seconds
        )
        environment = {
            "RANK": str(self.node),
            "WORLD_SIZE": str(self.planned),
            "NODE_RANK": str(self.node),
            "DTRAIN_LAUNCH": "1",
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
        signal.signal(
            signal.SIGUSR1,
            lambda *_: self.say(
                what="count", sent=cast("FailureDetector", own.peers).sent_lines, storage=storage.operations
            ),
        )
        own.announce()
        reason, step, failed_at, before, cpu = "", 0, 0.0, 0, time.process_time()
        while True:
            world = own.next_world(lambda: None, step=step, reason=reason)
            formed_at = time.monotonic()
            assert own.generation is not None
            number, size = own.generation.number, len(own.generation.members)
            own.has_state_of = number
            self.say(
                what="formed",
                number=number,
                size=size,
                at=formed_at,
                failed_at=failed_at,
                reason=reason,
                storage=storage.operations - before,
                rank=world.rank,
                cpu=time.process_time() - cpu,
            )
            group: Any = world.group
            while not group.called_off.wait(0.05 if world.rank == 0 else 60.0):
                if world.rank == 0 and own.recovery_reason:
                    group.fail(own.recovery_reason, communication=False)
            step, reason, cpu = step + 1, str(group.error), time.process_time()
            failed_at, before = group.failed_at, storage.operations
            self.say(what="failed", number=number, at=failed_at, reason=reason)

    def say(self, **fields: Any) -> None:
        """Write a line to the benchmark, shorter than what a pipe takes in one piece."""
        os.write(self.pipe, json.dumps({"node": self.node, "pid": os.getpid(), **fields}).encode()[:4000] + b"\n")


@dataclass
class Crowd:
    """Processes of members, forked from this one, and what they say."""

    planned: int
    folder: str
    beat_seconds: float
    pids: dict[int, int] = field(default_factory=dict)
    """The process of each node."""
    said: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._from, self._into = os.pipe()
        os.set_blocking(self._from, False)
        self._rest = b""

    def start(self, nodes: Sequence[int]) -> float:
        """Fork the processes of these nodes, which begin together; return when."""
        waiting, go = os.pipe()
        for node in nodes:
            pid = os.fork()
            if pid == 0:
                try:
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the benchmark
                    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
                        signal.signal(number, signal.SIG_DFL)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    os.close(self._from)
                    os.close(go)
                    os.read(waiting, 1)  # until the other end is closed
                    Member(node, self.planned, self.folder, self._into, self.beat_seconds).live()
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            self.pids[node] = pid
        os.close(waiting)
        began = time.monotonic()
        os.close(go)
        return began

    def wait_until(self, true: Callable[[], bool], what: str) -> None:
        """Read what members say until this is true. Raise TimeoutError after `LIMIT_SECONDS`."""
        until = time.monotonic() + LIMIT_SECONDS
        while not true():
            if time.monotonic() > until:
                tail = json.dumps(self.said[-5:])
                raise TimeoutError(f"{what} did not come within {LIMIT_SECONDS:g} s; the last words: {tail}")
            self.read(0.2)

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
        return {item["pid"]: item for item in self.said if item["what"] == "formed" and item["pid"] in alive}

    def wait_for_all(self, after: int, what: str) -> list[dict[str, Any]]:
        """Wait until all that live are in one generation of exactly them, later than ``after``; return their words."""

        def agreed() -> bool:
            found = self.newest().values()
            one = {item["number"] for item in found}
            return (
                len(found) == len(self.pids)
                and len(one) == 1
                and min(one) > after
                and all(item["size"] == len(self.pids) for item in found)
            )

        self.wait_until(agreed, what)
        return list(self.newest().values())

    def counts(self) -> dict[int, dict[str, Any]]:
        """Return what each process has sent and stored so far, by process."""
        self.said = [item for item in self.said if item["what"] != "count"]
        for pid in self.pids.values():
            os.kill(pid, signal.SIGUSR1)
        self.wait_until(lambda: sum(item["what"] == "count" for item in self.said) >= len(self.pids), "counts")
        return {item["pid"]: item for item in self.said if item["what"] == "count"}

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


def measure(nodes: int, rounds: int, beat_seconds: float, seed: int = 0) -> dict[str, Any]:
    """Return the figures of one number of nodes."""
    folder = tempfile.mkdtemp(prefix="control-plane-")
    crowd, chance = Crowd(nodes, folder, beat_seconds), random.Random(seed)
    figures: dict[str, Any] = {"beat_seconds": beat_seconds}
    try:
        began = crowd.start(range(nodes))
        started = crowd.wait_for_all(0, "the first generation")
        figures["start_seconds"] = round(max(item["at"] for item in started) - began, 3)
        figures["start_storage"] = _spread(item["storage"] for item in started)
        note(f"{nodes} nodes: {figures}")
        crowd.rest(CALM_SECONDS)
        before, at = crowd.counts(), time.monotonic()
        crowd.rest(REST_SECONDS)
        after, seconds = crowd.counts(), time.monotonic() - at
        sent = [(after[pid]["sent"] - before[pid]["sent"]) / seconds for pid in after]
        figures["messages_per_second"] = _spread(sent)
        stored = [(after[pid]["storage"] - before[pid]["storage"]) / seconds for pid in after]
        figures["storage_per_second"] = round(statistics.mean(stored), 2)
        detected: list[float] = []
        joined: list[float] = []
        for count in (1, 16):
            if count < nodes:
                figures[f"regroup_{count}"] = _regroups(crowd, count, rounds, chance, detected, joined)
                note(f"{nodes} nodes, {count} vanish: {figures[f'regroup_{count}']}")
        figures["detect_killed_seconds"] = round(statistics.median(detected), 4)
        figures["join"] = _quantiles(joined)
        figures["detect_frozen_seconds"] = _freeze(crowd, chance)
    finally:
        crowd.close()
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def _regroups(
    crowd: Crowd, count: int, rounds: int, chance: random.Random, detected: list[float], joined: list[float]
) -> dict[str, Any]:
    """Kill so many at once, again and again, and replace them each time."""
    seconds: list[float] = []
    operations: list[int] = []
    cpu: list[float] = []
    for _ in range(rounds):
        crowd.rest(CALM_SECONDS)
        crowd.said = list(crowd.newest().values())
        last = crowd.said[0]["number"]
        lost = chance.sample(sorted(crowd.pids), count)
        killed_at = time.monotonic()
        crowd.kill(lost)
        formed = crowd.wait_for_all(last, f"the generation without {count}")
        first = min(item["failed_at"] for item in formed)
        detected.append(first - killed_at)
        seconds.append(max(item["at"] for item in formed) - first)
        operations += [item["storage"] for item in formed]
        cpu += [item["cpu"] for item in formed]
        number, began = formed[0]["number"], crowd.start(lost)
        again = crowd.wait_for_all(number, f"the generation with {count} newcomers")
        joined.append(max(item["at"] for item in again) - began)
        note(f"  {seconds[-1]:.3f} s (generation {last} to {number}), joined after {joined[-1]:.3f} s")
    return {
        **_quantiles(seconds),
        "storage_mean": round(statistics.mean(operations), 2),
        "storage_max": max(operations),
        "cpu_seconds_mean": round(statistics.mean(cpu), 4),
        "cpu_seconds_max": round(max(cpu), 4),
    }


def _freeze(crowd: Crowd, chance: random.Random) -> float:
    """Return the seconds from SIGSTOP of a node until another one knows."""
    crowd.rest(2 * CALM_SECONDS)
    crowd.said = list(crowd.newest().values())
    pid = crowd.pids[chance.choice(sorted(crowd.pids))]
    frozen_at = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        crowd.wait_until(lambda: any(item["what"] == "failed" for item in crowd.said), "the detection of a frozen node")
    finally:
        os.kill(pid, signal.SIGCONT)
    return round(min(item["at"] for item in crowd.said if item["what"] == "failed") - frozen_at, 3)


def _spread(values: Iterator[float] | Sequence[float]) -> dict[str, float]:
    found = list(values)
    return {"mean": round(statistics.mean(found), 2), "max": round(max(found), 2)}


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and the number of these seconds; of few, p95 is the longest."""
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 3), "p95": round(p95, 3), "count": len(ordered)}


def choose_beat(nodes: int, cores: int) -> float:
    """Return the seconds between two heartbeats: the default of a training, and more where the beats of so many nodes
    alone would keep these cores busy."""
    return max(DistributedTrainingConfig().health_check_seconds, round(nodes / (256 * cores), 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with these command-line arguments; return 1 if a size could not be measured, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=list(SIZES), help="numbers of nodes")
    parser.add_argument("--rounds", type=int, default=8, help="losses of each size")
    parser.add_argument("--beat", type=float, help="seconds between two heartbeats; default: what the cores can carry")
    parser.add_argument("--save", action="store_true", help="write the line to benchmarks/results as well")
    options = parser.parse_args(arguments)
    stop_on_signals()
    torch.set_num_threads(1)
    gc.freeze()
    sizes: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for nodes in options.nodes:
        try:
            found = measure(nodes, options.rounds, options.beat or choose_beat(nodes, os.cpu_count() or 1))
            found |= measure_supervisor(nodes)
            sizes[str(nodes)] = {**found, "load_after": round(os.getloadavg()[0], 2)}
        except Exception as error:
            note(traceback.format_exc())
            failed[str(nodes)] = f"{type(error).__name__}: {error}"
    figures: Mapping[str, Any] = {"sizes": sizes, **({"failed": failed} if failed else {})}
    tell("control_plane", dict(figures), options.save)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

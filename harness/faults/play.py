"""Plays a tape: starts a job on three hosts, does to it what the tape says, and brings back what there is to judge."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from harness.faults import tape as tapes
from harness.faults.hosts import NODES, Hosts, ObservedIncarnation, Preload
from harness.faults.loop_rank import IS_LOOP
from harness.faults.network import Network
from harness.faults.tape import Fault, Tape
from trainer.rundir import STATUS, RunDir

POLL_SECONDS = 0.01
LIMIT_SECONDS = 150.0
"""A run that takes longer hangs; an undisturbed one takes about 6."""
MAX_LAUNCHES = 6
TRAINING: dict[str, Any] = {
    "world_size": NODES,
    "batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "epochs": tapes.EPOCHS,
    "warmup_steps": 10,
    "log_frequency": 1,
    "clip_norm": 0.5,
    "checkpoint_frequency": tapes.CHECKPOINT_FREQUENCY,
    "threads_per_rank": 1,
    "monitor_interval_seconds": 1.0,
    "health_check_seconds": 0.3,
    "peer_timeout_seconds": 1.5,
    "collective_timeout_seconds": 6.0,
    "communication_retries": 2,
    "allreduce_retry_seconds": 1.0,
    "micro_batch_floor": 4,
}

Strategy = Literal["ddp", "fsdp", "hsdp", "loop_of_two"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RANKS_EACH: dict[Strategy, int] = {"ddp": 1, "fsdp": 1, "hsdp": 2, "loop_of_two": 1}
"""Processes on each node: with ``hsdp`` two, which share its copy of the model."""
LOOP: Strategy = "loop_of_two"
"""A training by a loop of one's own (`harness.faults.loop_rank`), whose strategy is ``ddp``."""


def training_of(strategy: Strategy) -> dict[str, Any]:
    """The settings of a training with that strategy: the same micro-batches with each."""
    each = RANKS_EACH[strategy]
    return TRAINING | {
        "strategy": "ddp" if strategy == LOOP else strategy,
        "world_size": NODES * each,
        "gradient_accumulation_steps": TRAINING["gradient_accumulation_steps"] // each,
    }


@dataclass(slots=True)
class Outcome:
    """What is known after a run."""

    tape: Tape
    rundir: RunDir
    observed: list[ObservedIncarnation]
    launches: int
    seconds: float
    problems: list[str] = field(default_factory=list)
    """What went wrong on the way, for the harness's own part."""
    happened: Counter[str] = field(default_factory=Counter)
    """Faults that did happen, by kind; others came too late, or for a node that was not there."""
    left: list[int] = field(default_factory=list)
    ends_all: bool = False
    """Did the tape end all nodes, so that only a new start could go on?"""
    strategy: Strategy = "ddp"


def play(
    tape: Tape, preload: Preload, folder: Path, dataset: Path, network: Network | None = None,
    strategy: Strategy = "ddp",
) -> Outcome:  # fmt: skip
    """One run, to its end. ``network``: for tapes that want one; all its links are whole again afterwards."""
    config = {
        "dataset": {"uri": str(dataset)},
        "tracking": {"tensorboard": False},
        "model": {"factory": "paced:tcn", "args": {"dropout": tape.dropout}},
        "training": training_of(strategy),
    }
    environment = {"DTRAIN_CACHE": str(folder.parent / "cache"), "DTRAIN_STOP_GRACE_SECONDS": "5"}
    if strategy == LOOP:
        environment[IS_LOOP] = "1"
    hosts = Hosts(
        preload, folder, config, environment, network,
        max_replacements=0 if tape.replacement_delay is None else 12,
        replacement_delay=tape.replacement_delay or 0.0, ranks_each=RANKS_EACH[strategy],
    )  # fmt: skip
    player = _Player(tape, hosts, strategy)
    try:
        return player.run()
    finally:
        hosts.close()
        if network is not None:
            network.restore_all()


class _Player:
    def __init__(self, tape: Tape, hosts: Hosts, strategy: Strategy) -> None:
        self.tape, self.hosts = tape, hosts
        self.outcome = Outcome(tape, hosts.rundir, hosts.observed, 0, 0.0, strategy=strategy)
        self._due = [fault for fault in tape.faults if fault.at is None]
        self._later: list[tuple[float, Callable[[], Any]]] = []
        self._exact = {fault.node: fault for fault in tape.faults if fault.at is not None and fault.kind == "stop"}
        self._down: Counter[tuple[int, int]] = Counter()
        """How many faults hold a way cut, delayed or throttled: it is restored when the last one ends."""
        self._began: float | None = None
        self._killed: set[int] = set()

    def run(self) -> Outcome:
        hosts, outcome = self.hosts, self.outcome
        started = time.monotonic()
        hosts.start([entry for fault in self.tape.faults if (entry := fault.for_trainer())])
        while True:
            hosts.look()
            if not hosts.running and not self._go_on():
                break
            if time.monotonic() - started > LIMIT_SECONDS:
                outcome.problems.append(f"it did not end within {LIMIT_SECONDS:g} s")
                break
            self._play()
            time.sleep(POLL_SECONDS)
        for _, undo in self._later:
            undo()
        hosts.look()
        outcome.seconds, outcome.launches = time.monotonic() - started, hosts.launches
        outcome.left = [] if outcome.problems else hosts.left()
        self._count_exact()
        return outcome

    def _go_on(self) -> bool:
        """The supervisor has ended. If the work is not done, start again, as who reads its message would."""
        status = self.hosts.rundir.read_json(STATUS) or {}
        if status.get("state") == "succeeded":
            return False
        message = str(status.get("message"))
        if not self._all_ended():
            self.outcome.problems.append(f"the job failed: {message}")
            return False
        self.outcome.ends_all = True
        if self.hosts.launches >= MAX_LAUNCHES:
            self.outcome.problems.append(f"{MAX_LAUNCHES} starts did not finish it: {message}")
            return False
        self.hosts.start()
        return True

    def _all_ended(self) -> bool:
        """Has the tape ended every node's newest incarnation, or the supervisor?"""
        if self.hosts.supervisor in self._killed:
            return True
        presences = self.hosts.rundir.nodes()
        launch = max((item.launch for item in presences), default=0)
        newest = {item.node_id: item for item in presences if item.launch == launch}
        return bool(newest) and all(
            item.exit_codes and all(code in (-signal.SIGKILL, -signal.SIGTERM, 143) for code in item.exit_codes)
            for item in newest.values()
        )

    def _play(self) -> None:
        if self._began is None:
            if (self.hosts.run_dir / "membership" / "g000001.json").exists():
                self._began = time.monotonic()
            return
        now = time.monotonic()
        for fault in [fault for fault in self._due if (fault.after or 0.0) <= now - self._began]:
            self._due.remove(fault)
            self._do(fault)
        for item in [item for item in self._later if item[0] <= now]:
            self._later.remove(item)
            item[1]()
        for node in [node for node in self._exact if self.hosts.is_frozen(node)]:
            fault = self._exact.pop(node)
            self._after(fault, self._thaw(node))

    def _do(self, fault: Fault) -> None:
        hosts, done = self.hosts, True
        if fault.kind == "kill":
            done = hosts.signal(fault.node, signal.SIGKILL)
        elif fault.kind == "evict":
            done = hosts.signal(fault.node, signal.SIGTERM)
        elif fault.kind == "stop":
            done = hosts.signal(fault.node, signal.SIGSTOP)
            self._after(fault, self._thaw(fault.node))
        elif fault.kind == "supervisor":
            if done := hosts.running:
                self._killed.add(hosts.supervisor)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hosts.supervisor, signal.SIGKILL)
        elif fault.kind == "storage":
            self._after(fault, _take_away(hosts.run_dir / "checkpoints"))
        elif hosts.network is not None:
            self._disturb(fault, hosts.network)
        if done and hosts.running:
            self.outcome.happened[fault.kind] += 1

    def _disturb(self, fault: Fault, network: Network) -> None:
        others = [node for node in range(NODES) if node != fault.node]
        pairs = [(fault.node, other) for other in (others if fault.other is None else [fault.other])]
        one_way = fault.one_way
        for one, other in pairs:
            if fault.kind == "delay":
                network.delay(one, other, fault.amount or 0.0, one_way)
            elif fault.kind == "throttle":
                network.throttle(one, other, fault.amount or 1.0, one_way)
            else:
                network.cut(one, other, one_way)
            self._down[min(one, other), max(one, other)] += 1

        def restore() -> None:
            for one, other in pairs:
                pair = min(one, other), max(one, other)
                self._down[pair] -= 1
                if not self._down[pair]:
                    network.restore(one, other)

        self._after(fault, restore)

    def _thaw(self, node: int) -> Callable[[], Any]:
        """To continue this very incarnation, even if another has come in its place."""
        incarnation = self.hosts.newest(node)

        def thaw() -> None:
            if incarnation is not None and incarnation.ended_at is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(incarnation.pid, signal.SIGCONT)

        return thaw

    def _after(self, fault: Fault, undo: Callable[[], Any]) -> None:
        self._later.append((time.monotonic() + (fault.seconds or 0.0), undo))

    def _count_exact(self) -> None:
        """Which faults inside the nodes have happened, by what is seen of them."""
        first = {
            item.node_id: item for item in self.outcome.rundir.nodes() if (item.launch, item.incarnation) == (1, 1)
        }
        memory = Counter(event["rank"] for event in self.outcome.rundir.events("out_of_memory"))
        for fault in self.tape.faults:
            if fault.at is None:
                continue
            codes = first[fault.node].exit_codes if fault.node in first else ()
            if (
                (fault.kind == "kill" and -signal.SIGKILL in codes)
                or (fault.kind == "evict" and 143 in codes)
                or (fault.kind == "stop" and fault.node not in self._exact)
                or (fault.kind == "oom" and memory)
            ):
                self.outcome.happened[fault.kind] += 1


def _take_away(folder: Path) -> Callable[[], Any]:
    """Put a file where the folder was: whatever is written into it fails. Returns what puts it back."""
    away = folder.with_name(folder.name + ".away")
    folder.mkdir(exist_ok=True)
    while True:
        try:
            folder.rename(away)
            folder.touch(exist_ok=False)
            break
        except FileExistsError:  # a writer made the folder in between: nothing is in it that counts
            shutil.rmtree(folder, ignore_errors=True)
            folder.touch()
            break

    def put_back() -> None:
        folder.unlink()
        try:
            away.rename(folder)
        except OSError:  # a writer was faster
            shutil.rmtree(folder, ignore_errors=True)
            away.rename(folder)

    return put_back


def undisturbed(tape: Tape) -> Tape:
    """The tape of the same training in which nothing happens."""
    blank = Tape(seed=-1, faults=())
    if tape.dropout == blank.dropout:
        return blank
    return replace(blank, seed=-2, faults=(Fault(kind="oom", at="forward", step=tapes.STEPS + 1),))

"""`RankReports`: this process's own reports: its events, the time of each phase, samples of its node, and a `Watchdog`
that reports where this rank stands when it sees no progress, before the timeout ends the group.

The contents of a step's or an evaluation's report are put together where they are measured.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.comm.group import Collective, InterruptibleGroup
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig, JobConfig
from trainer.documents.schemas import NO_COLLECTIVE
from trainer.observability.node_monitor import NodeMonitor
from trainer.observability.reporter import OPENING_SECONDS, Reporter, sinks_of
from trainer.rundir import RunDir

Watch = Callable[[str, Mapping[str, Any]], object]
"""Called with the kind and the fields of an event."""
PHASES = ("startup", "data", "training", "evaluation", "checkpoint", "regroup", "finalise")
HANG_SECONDS, HANG_STEPS = 20.0, 20
"""By default a step counts as a hang if it takes longer than the first, in seconds, and longer than the second, in
usual steps."""
PATIENT = "barrier"
"""The collective in which ranks wait while one works alone, for as long as that takes."""
STACKS_BYTES, FRAMES, RECENT = 20_000, 64, 10
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TRAINER = f"{Path(__file__).parents[1]}{os.sep}"
_log = logging.getLogger(__name__)


class RankReports:
    """The reports of this process under its rank. Before its first world it has no rank: phases are kept and reported
    later, and other events are dropped."""

    def __init__(self, job: JobConfig, rundir: RunDir, watch: Watch | None = None) -> None:
        """``watch`` is called with each event of this process, as it is reported."""
        self.job, self.rundir, self._watch = job, rundir, watch
        self.seconds = dict.fromkeys(PHASES, 0.0)
        """Seconds spent in each phase so far."""
        self._mark = time.monotonic()
        self.watchdog = Watchdog(job.training)
        self.reporter: Reporter | None = None
        self.monitor: NodeMonitor | None = None
        """The monitor of the node, on its first rank; None on the others, and before the first world."""
        self.nodes: list[int] = []
        """The node of each rank of the present world."""
        self._opens_tracking = False
        """Whether rank 0 has begun to open its tracking in the present world, for which the others have to wait. The
        same on all ranks."""
        self._has_told_of_traffic = False
        self._opening_ends = 0.0

    def emit(self, kind: str, **fields: Any) -> None:
        """Report an event; returns at once."""
        if self.reporter is not None:
            self.reporter.emit(kind, **fields)
            if self._watch is not None:
                self._watch(kind, fields)

    def end_phase(self, name: str) -> None:
        """Add the time since the last mark to a phase, and report its total."""
        self.watchdog.rest()
        now = time.monotonic()
        self.seconds[name] += now - self._mark
        self._mark = now
        self.emit("phase", name=name, seconds=round(self.seconds[name], 3))

    def adopt_world(self, world: World) -> None:
        """Report under this process's rank in the world, and watch the node if it is the node's first rank. A
        collective: it waits for the group. `wait_until_open` comes next."""
        facts = world.facts
        sinks = sinks_of(self.job, self.rundir, world.rank)
        told = world.all_gather_object((facts.node_rank, os.getpid(), self.reporter is None))
        ranks = [(node, pid) for node, pid, _ in told]
        self.nodes = [node for node, _ in ranks]
        # Where a node is replaced, training goes on at once: rank 0 reports already, or opens what it lacks meanwhile.
        self._opens_tracking = told[0][2]
        if self.reporter is None:
            self.reporter = Reporter(self.rundir, world.rank, world.generation, sinks)
            for name, seconds in self.seconds.items():
                if seconds:
                    self.reporter.emit("phase", name=name, seconds=round(seconds, 3))
        else:
            self.reporter.move(world.rank, world.generation, sinks)
        self.reporter.has_other_nodes = len(set(self.nodes)) > 1
        self.watchdog.attend(self.reporter, world.group, self.nodes, facts.node_rank)
        if facts.local_rank == 0 and self.monitor is None:
            pids = [pid for node, pid in ranks if node == facts.node_rank]
            interval = self.job.training.monitor_interval_seconds
            self.monitor = NodeMonitor(facts.node_rank, self.reporter, interval, pids)
            self.monitor.start()
        if world.open_traffic and world.rank == 0 and not self._has_told_of_traffic:
            self._has_told_of_traffic = True
            if self.job.training.encryption != "off":  # else somebody wants it so, and the log says it
                self.reporter.emit("error", message=world.open_traffic, fatal=False)
        self._opening_ends = time.monotonic() + min(OPENING_SECONDS, self.job.training.collective_timeout_seconds / 3)

    def wait_until_open(self) -> None:
        """Wait for this rank's tracking, as long as training may wait for it. Without `_opens_tracking`, that is not at
        all."""
        if self.reporter is not None and self._opens_tracking:
            self.reporter.wait_until_open(max(0.0, self._opening_ends - time.monotonic()))

    def close_reporter(self, tracking_seconds: float = 60.0) -> None:
        """Write all reports, the node's last sample among them, and wait up to ``tracking_seconds`` for tracking
        servers; later events are lost."""
        if self.monitor is not None:
            self.monitor.stop()
        if self.reporter is not None:
            self.reporter.close(tracking_seconds)

    def close(self, tracking_seconds: float) -> None:
        """End all threads; all reports are on disk afterwards."""
        self.watchdog.stop()
        self.close_reporter(tracking_seconds)


class Watchdog:
    """A watchdog of one rank. The training calls `progress` and `rest`, which cost next to nothing.

    A rank that never enters a collective makes all others wait for it, and all of them look alike from outside. So the
    thread of every rank reports its own view, a ``hang`` event; all of them together show which rank is missing
    (`dtrain_dagster.monitoring.hangs`).
    """

    def __init__(self, config: DistributedTrainingConfig) -> None:
        self._given, self._timeout = config.hang_seconds, config.collective_timeout_seconds
        self._seconds: deque[float] = deque(maxlen=64)
        self._mark: tuple[int, float | None] = (0, None)
        """Steps done, and when the current one began; None if something else is under way. Replaced as a whole."""
        self._told: object = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._world: tuple[Reporter, InterruptibleGroup | None, Sequence[int], int] | None = None

    def attend(self, reporter: Reporter, group: InterruptibleGroup | None, nodes: Sequence[int], node_id: int) -> None:
        """Watch this rank in a new world from now on. ``nodes``: that of each rank."""
        self._world = (reporter, group, nodes, node_id)
        if not self._thread.is_alive():
            self._thread.start()

    def progress(self, step: int) -> None:
        """Note that ``step`` steps are done and the next one begins."""
        now, (before, began) = time.monotonic(), self._mark
        if began is not None and step > before:
            self._seconds.append(now - began)
        self._mark = (step, now)

    def rest(self) -> None:
        """Note that something other than a step begins: an evaluation, a checkpoint, a regroup. It has no limit of its
        own; a rank reports only if it waits in one collective for half of its timeout."""
        self._mark = (self._mark[0], None)

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _limit(self) -> float:
        seconds = list(self._seconds)
        is_alone = self._world is not None and self._world[1] is None
        timeout = math.inf if is_alone else self._timeout
        return limit_seconds(self._given, statistics.median(seconds) if seconds else None, timeout)

    def _work(self) -> None:
        while not self._stop.wait(min(1.0, self._limit() / 10, self._timeout / 20)):
            try:
                self._look()
            except Exception:  # a watchdog that fails must not be what ends a training
                _log.exception("the watchdog could not check the ranks")

    def _look(self) -> None:
        world, mark, now = self._world, self._mark, time.monotonic()
        if world is None or self._told is mark:  # once per hang
            return
        reporter, group, nodes, node_id = world
        step, began = mark
        recent = [item for item in (list(group.collectives) if group else []) if item.began is not None]
        failed = group is not None and group.error is not None  # then nobody waits any more for what did not end
        waits_in = recent[-1] if recent and recent[-1].ended is None and not failed else None
        is_late = began is not None and now - began > self._limit()
        waited = now - (_began(waits_in) if waits_in else began or now)
        is_waiting = waits_in is not None and waits_in.what != PATIENT and waited > self._timeout / 2
        if not is_late and not is_waiting:
            return
        self._told = mark
        fields: dict[str, Any] = {
            "step": step + (began is not None),
            "node_id": node_id,
            "nodes": list(nodes),
            "operation": waits_in.what if waits_in else NO_COLLECTIVE,
            "sequence": recent[-1].sequence if recent else 0,
            "waited_seconds": round(waited, 3),
            "where": where_now(),
            "stacks": stacks(),
            "recent": [
                {"sequence": item.sequence, "what": item.what, "ended": item.ended is not None}
                for item in recent[-RECENT:]
            ],
        }
        reporter.emit("hang", **fields)
        _log.warning(
            "no progress in step %d: %s for %.1f s (collective %d), in %s\n%s",
            fields["step"],
            fields["operation"],
            waited,
            fields["sequence"],
            fields["where"],
            fields["stacks"],
        )


def limit_seconds(given: float | None, usual: float | None, timeout: float) -> float:
    """Return how many seconds a step may take. ``given``: as configured; ``usual``: the median step, None before the
    first, which may compile the model for as long as that takes; ``timeout``: infinite if there are no other ranks.

    A rank that makes the others wait reports after about a usual step plus half of the timeout; the other half is left
    for the report.
    """
    if usual is None:
        return math.inf if given is None else given
    return min(max(HANG_SECONDS, HANG_STEPS * usual) if given is None else given, usual + timeout / 2)


def _began(collective: Collective) -> float:
    assert collective.began is not None
    return collective.began


def where_now() -> str:
    """Return ``file:line function`` of the innermost line of the main thread that is the trainer's or the user's
    own."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return next((_place(item) for item in _inside_out(frame) if _is_own(item.f_code.co_filename)), "")


def stacks() -> str:
    """Return where all other threads of this process stand, the main thread first; as much as fits. Source lines are
    left out: to read them may mean to wait for the very disk that hangs."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += [
            f'  File "{item.f_code.co_filename}", line {item.f_lineno}, in {item.f_code.co_qualname}'
            for item in reversed(list(itertools.islice(_inside_out(frames[ident]), FRAMES)))
        ]
    return "\n".join(lines).encode(errors="replace")[:STACKS_BYTES].decode(errors="ignore")


def _inside_out(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_own(file: str) -> bool:
    """Return whether a file is neither Python's nor an installed package's, unless that is the trainer itself."""
    return file.startswith(_TRAINER) or not (file.startswith(_LIBRARIES) or file.startswith("<"))


def _place(frame: FrameType) -> str:
    """Return ``file:line function``, with the file as seen from the nearest folder that Python imports from."""
    file = frame.f_code.co_filename
    roots = [root for root in sys.path if root and file.startswith(f"{root}{os.sep}")]
    name = file[len(max(roots, key=len)) + 1 :] if roots else os.path.basename(file)
    return f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}"

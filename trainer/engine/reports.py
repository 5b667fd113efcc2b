"""`RankReports`: this process's own reports: its events, the time of each phase, and samples of its node.

The threads behind it are in `trainer.observability`; starting, moving and ending them belongs here. The contents of a
step's or an evaluation's report are put together where they are measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.comm.world import World
from trainer.config import JobConfig
from trainer.observability.node_monitor import NodeMonitor
from trainer.observability.reporter import OPENING_SECONDS, Reporter, sinks_of
from trainer.observability.watchdog import Watchdog
from trainer.rundir import RunDir

Watch = Callable[[str, Mapping[str, Any]], object]
"""Called with the kind and the fields of an event."""
PHASES = ("startup", "data", "training", "evaluation", "checkpoint", "regroup", "finalise")


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

    def enter_world(self, world: World) -> None:
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

"""A hard budget: at a number of paid node-seconds the job saves a checkpoint and stops (``training.max_node_seconds``).

The nodes themselves keep it, so that it holds when the process that started the job is dead. What was paid is in the
run directory, as the presence of every node in every launch. Each process adds it up, seldom while there is room and
often near the end, and reads the limit again each time: ``budget.json`` may raise it, or give one to a job that had
none, while it runs. There are two limits. The *early* one leaves room for a checkpoint: rank 0 sees it and all stop
together after a step, or rank 0 alone in the middle of an evaluation. The *last* one is the budget itself: there every
process ends where it stands, in its start-up, in a regroup, in a collective that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from trainer.comm.world import RankFacts
from trainer.config import DistributedTrainingConfig
from trainer.documents.paid_time import Paid, limit_of, sum_paid
from trainer.documents.presences import stale_seconds
from trainer.engine.result import write_result
from trainer.exit_codes import BUDGET
from trainer.observability.reporter import write_last_events
from trainer.rundir import LIMIT, RunDir
from trainer.runtime import clock
from trainer.runtime.launch import Launch
from trainer.runtime.packages import load

COMMIT_SECONDS = 60.0
"""Seconds that the end of a training waits for the last checkpoint."""
MARGIN_SECONDS = 1.0
"""Seconds of each node, beside the checkpoint: to agree, to write the result, and to exit."""
UNMEASURED_SECONDS = 2.0
"""Seconds that a checkpoint is assumed to need before one was written."""
SOONEST_SECONDS, LATEST_SECONDS = 0.5, 60.0
"""The shortest and the longest pause between two looks at what was paid."""
LAST_PRESENCE = "trainer.observability.node_presence:write_last_presence"
LAST_EVENTS_SECONDS = 5.0
"""Seconds that the end waits for events to be written."""
_log = logging.getLogger(__name__)


def seconds_to_next_look(left: float, nodes: int) -> float:
    """Return the seconds until the next look: at most a quarter of the way to the end, so that new nodes are
    noticed."""
    return min(LATEST_SECONDS, max(SOONEST_SECONDS, left / (4 * max(1, nodes))))


def begin_budget(
    config: DistributedTrainingConfig,
    rundir: RunDir,
    facts: RankFacts,
    environment: Mapping[str, str],
    regroups_in: int | None,
    steps_done: Callable[[], int],
) -> Budget:
    """Start to watch the budget of this process's job, and return it. ``regroups_in``: the launch of the cluster that
    this process regroups in, if it does, which its result names. ``steps_done`` is called when the budget is spent."""

    def end(budget: Budget) -> None:
        end_at_budget(budget, rundir, regroups_in, steps_done())

    launch = Launch.read(environment).number
    return Budget(rundir, config.max_node_seconds or math.inf, launch, facts.node_count, end)


def end_at_budget(budget: Budget, rundir: RunDir, launch: int | None, step: int) -> None:
    """End this process where it stands, since the budget is spent; not one that has done all its work."""
    message = budget.explain(f"at step {step}, before the next checkpoint" if step else "before the first step")
    with contextlib.suppress(OSError, ValueError):
        write_result(rundir, {"status": "budget", "steps": step, "error": message}, launch)
        result = rundir.read_result() or {}
        if result.get("status") == "succeeded" and result.get("launch") == launch:
            return
    print(message, file=sys.stderr, flush=True)  # noqa: T201 - the log of the node
    write_last_events(LAST_EVENTS_SECONDS)
    load(LAST_PRESENCE)(BUDGET)
    os._exit(BUDGET)


class Budget:
    """The budget as this process watches it. ``limit``: in node-seconds, as long as the run directory names no other.
    ``end`` is called with the budget, from a thread, when it is spent. ``nodes`` are counted from now on where their
    presence is not recorded."""

    def __init__(self, rundir: RunDir, limit: float, launch: int, nodes: int, end: Callable[[Budget], object]) -> None:
        self.rundir, self.limit, self.launch, self._end = rundir, limit, launch, end
        self._first_limit = limit
        self.checkpoint_seconds: float | None = None
        """The longest duration of a checkpoint that was measured."""
        self._unrecorded = Paid(0.0, nodes)
        self._began = self._looked_at = time.monotonic()
        self._paid = self._unrecorded
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="budget", daemon=True).start()

    @property
    def paid(self) -> float:
        """Node-seconds up to now: what was read, and what has been spent since."""
        found, at = self._paid, self._looked_at
        return found.after(time.monotonic() - at)

    def is_due(self, step_seconds: float = 0.0) -> bool:
        """Return whether to stop now, so that a checkpoint fits after one more step of that length."""
        known = self.checkpoint_seconds
        reserve = MARGIN_SECONDS + (UNMEASURED_SECONDS if known is None else 1.5 * known) + step_seconds
        if self.paid + self._paid.nodes * reserve < self.limit:
            return False
        self._read_limit()  # it may have been raised since the last look
        return self.paid + self._paid.nodes * reserve >= self.limit

    def measured(self, checkpoint_seconds: float) -> None:
        """Record how long a checkpoint took."""
        self.checkpoint_seconds = max(checkpoint_seconds, self.checkpoint_seconds or 0.0)

    def explain(self, where: str) -> str:
        """Return the message for a job that has come to its budget."""
        return (
            f"stopped at its budget of {self.limit / 3600:.4g} node-hours (training.max_node_seconds = {self.limit:g}) "
            f"{where}, {self.paid / 3600:.4g} node-hours are paid; raise the budget and start the job again to go on"
        )

    def close(self) -> None:
        """Stop watching; `end` is not called any more."""
        self._closed.set()

    def _watch(self) -> None:
        while True:
            self._read_limit()
            if self.limit < math.inf:  # without a limit the sum is not needed
                self._look()
            left = self.limit - self.paid
            if left <= 0:
                break
            if self._closed.wait(min(seconds_to_next_look(left, self._paid.nodes), left / max(1, self._paid.nodes))):
                return
        if not self._closed.is_set():
            self._end(self)

    def _read_limit(self) -> None:
        try:
            self.limit = limit_of(self.rundir.read_json(LIMIT), self._first_limit)
        except Exception as error:  # of any kind: the last limit that was read still holds
            _log.warning("%s/%s cannot be read; the budget stays as it was: %s", self.rundir.uri, LIMIT, error)

    def _look(self) -> None:
        try:
            nodes = self.rundir.nodes()  # raises where one is damaged, for then the sum is unknown
        except Exception as error:  # of any kind: the watch over the budget must go on
            _log.warning("the amount paid so far cannot be read; the last known one is kept: %s", error)
            return
        found, at = sum_paid(nodes, self.launch, clock.now(), stale_seconds(self.rundir.storage)), time.monotonic()
        if not any(node.launch == self.launch for node in nodes):  # their presence is not recorded, or not yet
            found = Paid(found.node_seconds + self._unrecorded.after(at - self._began), self._unrecorded.nodes)
        self._paid, self._looked_at = found, at

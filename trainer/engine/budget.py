"""A hard budget: at so many paid node-seconds the job saves a checkpoint and stops (``training.max_node_seconds``).

It is kept by the nodes themselves, so that it holds when whoever started the job is dead. What was paid is in the run
directory, as the presence of every node in every launch; each process adds it up, seldom while there is room and often
near the end, and reads anew what the budget is: ``budget.json`` may raise it, or give one to a job that had none, while
it runs. There are two limits. The *early* one leaves room for a checkpoint: rank 0 sees it and all stop together
after a step, or rank 0 alone in the middle of an evaluation. The *last* one is the budget itself: there every process
ends where it stands, in its start-up, in a regroup, in a collective that hangs.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.comm.group import GroupError
from trainer.rundir import LIMIT, NodePresence, RunDir, stale_seconds
from trainer.runtime import clock

if TYPE_CHECKING:
    from trainer.engine.trainer import DistributedTrainer

COMMIT_SECONDS = 60.0
"""How long the end of a training waits for the last checkpoint."""
MARGIN_SECONDS = 1.0
"""Of each node, beside the checkpoint: to agree, to say how it ended, and to be gone."""
UNMEASURED_SECONDS = 2.0
"""What a checkpoint is taken to need before one was written."""
SOONEST_SECONDS, LATEST_SECONDS = 0.5, 60.0
"""Between two looks at what was paid."""
_log = logging.getLogger(__name__)


class BudgetSpent(Exception):
    """The budget is spent, but for what a checkpoint needs. ``agreed``: all ranks know."""

    def __init__(self, agreed: bool) -> None:
        super().__init__("the budget is spent")
        self.agreed = agreed


@dataclass(frozen=True, slots=True)
class Paid:
    """What was paid at a moment, and at which rate it goes on: so many nodes are there."""

    node_seconds: float
    nodes: int

    def after(self, seconds: float) -> float:
        return self.node_seconds + self.nodes * max(0.0, seconds)


def paid(nodes: Iterable[NodePresence], launch: int, now: float, stale: float) -> Paid:
    """Node-seconds over all stays of all launches. Of ``launch``, this one, a node goes on being paid that has not
    ended and was heard of within ``stale`` seconds; any other that left no end counts until it was last heard of."""
    total, here = 0.0, 0
    for node in nodes:
        heard = node.heard_at(now)
        is_here = node.launch == launch and node.ended_at is None and now - heard < stale
        here += is_here
        seen = node.last_seen_at or node.started_at
        total += node.seconds(seen + max(0.0, now - heard) if is_here else seen)
    return Paid(total, here)


def pause(left: float, nodes: int) -> float:
    """Seconds until the next look: a quarter of the way to the end at most, so that nodes which come are noticed."""
    return min(LATEST_SECONDS, max(SOONEST_SECONDS, left / (4 * max(1, nodes))))


def limit_of(document: Any, default: float) -> float:
    """Node-seconds that ``budget.json`` allows, infinite where it sets no limit; ``default`` where there is none.
    ValueError for one that is damaged."""
    if document is None:
        return default
    found = document.get("max_node_seconds", "missing") if isinstance(document, dict) else "missing"
    if found is None:
        return math.inf
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f"max_node_seconds is {found!r}, not a number above 0")
    return float(found)


def begin(trainer: DistributedTrainer) -> Budget:
    """Look after the budget of this process's job, from now on."""
    from trainer.engine.result import end_at_budget

    limit, facts = trainer.config.max_node_seconds or math.inf, trainer.facts
    launch, nodes = int(os.environ.get("DTRAIN_LAUNCH", "1")), facts.world_size // facts.local_world_size
    return Budget(trainer.rundir, limit, launch, nodes, partial(end_at_budget, trainer))


def is_due(trainer: DistributedTrainer) -> bool:
    """Is it time to stop, as rank 0 sees it? The others hear of it."""
    if trainer.budget is None or trainer.world.rank != 0:
        return False
    return trainer.budget.is_due(trainer.recent_steps[-1]["step_seconds"] if trainer.recent_steps else 0.0)


def stop_judging(trainer: DistributedTrainer) -> None:
    """Called between two batches of an evaluation, in which no rank hears of another."""
    if is_due(trainer):
        raise BudgetSpent(agreed=trainer.world.world_size == 1)


def save(trainer: DistributedTrainer, spent: BudgetSpent) -> None:
    """The checkpoint to go on from."""
    if trainer.saved_step < trainer.progress.step:
        trainer.save(wait=True)
    trainer.checkpoints.wait(COMMIT_SECONDS)
    if spent.agreed:  # nobody leaves before: a cluster may end all nodes with the first that does
        with suppress(GroupError):
            trainer.world.meet()


class Budget:
    """Looks after the budget in this process. ``limit``: in node-seconds, as long as the run directory names no other.
    ``end`` is called from a thread when it is spent to the last; ``nodes`` are counted where nobody keeps their
    presence, from now on."""

    def __init__(self, rundir: RunDir, limit: float, launch: int, nodes: int, end: Callable[[], object]) -> None:
        self.rundir, self.limit, self.launch, self._end = rundir, limit, launch, end
        self._first_limit = limit
        self.checkpoint_seconds: float | None = None
        """The longest that was measured."""
        self._unrecorded = Paid(0.0, nodes)
        self._began = self._looked_at = time.monotonic()
        self._paid = self._unrecorded
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="budget", daemon=True).start()

    @property
    def paid(self) -> float:
        """Node-seconds up to now: what was read, and what has gone by since."""
        found, at = self._paid, self._looked_at
        return found.after(time.monotonic() - at)

    def is_due(self, step_seconds: float = 0.0) -> bool:
        """Is it time to stop, for a checkpoint after one more step of that length to fit?"""
        known = self.checkpoint_seconds
        reserve = MARGIN_SECONDS + (UNMEASURED_SECONDS if known is None else 1.5 * known) + step_seconds
        if self.paid + self._paid.nodes * reserve < self.limit:
            return False
        self._read_limit()  # it may have been raised since the last look
        return self.paid + self._paid.nodes * reserve >= self.limit

    def measured(self, checkpoint_seconds: float) -> None:
        self.checkpoint_seconds = max(checkpoint_seconds, self.checkpoint_seconds or 0.0)

    def explain(self, where: str) -> str:
        """What a person reads of a job that has come to its budget."""
        return (
            f"stopped at its budget of {self.limit / 3600:.4g} node-hours (training.max_node_seconds = {self.limit:g}) "
            f"{where}, {self.paid / 3600:.4g} node-hours are paid; raise the budget and start the job again to go on"
        )

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while True:
            self._read_limit()
            if self.limit < math.inf:  # else nobody asks what was paid
                self._look()
            left = self.limit - self.paid
            if left <= 0:
                break
            if self._closed.wait(min(pause(left, self._paid.nodes), left / max(1, self._paid.nodes))):
                return
        if not self._closed.is_set():
            self._end()

    def _read_limit(self) -> None:
        try:
            self.limit = limit_of(self.rundir.read_json(LIMIT), self._first_limit)
        except Exception as error:  # of whatever kind: what was read last still holds
            _log.warning("%s/%s cannot be read, the budget stays as it was: %s", self.rundir.uri, LIMIT, error)

    def _look(self) -> None:
        try:
            nodes = self.rundir.nodes()  # of a damaged one nobody knows what was paid
        except Exception as error:  # of whatever kind: the budget must not be left alone
            _log.warning("what was paid so far cannot be read, and is carried forward: %s", error)
            return
        found, at = paid(nodes, self.launch, clock.now(), stale_seconds(self.rundir.storage)), time.monotonic()
        if not any(node.launch == self.launch for node in nodes):  # nobody keeps count of them, or not yet
            found = Paid(found.node_seconds + self._unrecorded.after(at - self._began), self._unrecorded.nodes)
        self._paid, self._looked_at = found, at

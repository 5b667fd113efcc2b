"""Cores that ranks share with each other or with other work, from windows of one world. Pure.

A rank that is ready to compute and has no core is late without being slow: nobody gains if its node is replaced. The
trainer reports for how long each rank was in that state, and by how much a step would be shorter without it. Where the
kernel does not tell, ranks are known to share cores if a machine has more of them than cores.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain_dagster.monitoring.noise import is_steadily_above
from dtrain_dagster.monitoring.windows import seconds_of
from trainer.documents.events import TimingEvent

CONTENTION_SHARE = 0.10
"""Share of the step from which missing cores count: every system takes a core away for some of it."""
FEWEST_CONTENDED = 3
"""Windows that must tell of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contention:
    """Cores that are missing."""

    share: float
    """Share of the time of these windows by which they would be shorter with a core for each rank."""
    queued_seconds: float
    """Seconds of a step for which the rank with fewest cores is ready and has none."""
    step_seconds: float
    rank: int
    """The rank that lacks cores most."""
    ranks: int
    """Ranks on the machine of that rank."""
    cores: int
    """Cores that these may use; 0: not known."""
    machines: int

    @property
    def is_crowded(self) -> bool:
        """Whether the ranks alone are more than the cores."""
        return 0 < self.cores < self.ranks

    @property
    def reason(self) -> str:
        """Return who shares what: ``3 ranks share 2 cores``."""
        if self.is_crowded:
            return f"{self.ranks} ranks share {_count(self.cores, 'core')}"
        where = f", which has {_count(self.ranks, 'rank')} and {_count(self.cores, 'core')}" if self.cores else ""
        return f"other work takes cores of the machine of rank {self.rank}{where}"


def find_contention(world: Sequence[TimingEvent]) -> Contention | None:
    """Return the cores that are missing in windows of one world; None where none are, or the trainer does not tell."""
    told = [window for window in world if "held_up_seconds" in window.facts and window.queued]
    if len(told) < FEWEST_CONTENDED:
        return None
    held_up = [float(window.facts["held_up_seconds"]) for window in told]
    if not is_steadily_above(CONTENTION_SHARE, [lost / row.seconds for lost, row in zip(held_up, told, strict=True)]):
        return None
    queued = [statistics.median(column) for column in zip(*(window.queued for window in told), strict=True)]
    rank = max(range(len(queued)), key=queued.__getitem__)
    last = told[-1]
    machines = last.machines or (0,) * last.world_size
    return Contention(
        share=sum(lost * window.steps for lost, window in zip(held_up, told, strict=True)) / seconds_of(told),
        queued_seconds=queued[rank],
        step_seconds=statistics.median(window.seconds for window in told),
        rank=rank,
        ranks=machines.count(machines[rank]),
        cores=last.cores[rank] if last.cores else 0,
        machines=len(set(machines)),
    )


def is_unexplained(window: TimingEvent, rank: int) -> bool:
    """Return whether this rank shares cores with other ranks and nobody knows for how long it had none: then its
    lateness is no sign of a slow node."""
    if window.queued or not window.machines or not window.cores:
        return False
    return Counter(window.machines)[window.machines[rank]] > window.cores[rank]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

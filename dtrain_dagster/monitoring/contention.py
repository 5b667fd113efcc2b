"""Cores that ranks share with each other or with other work, from windows of one world. Pure.

A rank that is ready to compute and has no core is late without being slow: nobody gains if its node is replaced. The
trainer reports for how long each rank was in that state, and by how much a step would be shorter without it.

Ranks that are more than the cores of their machine share them (`ranks_that_share_cores`), as three local nodes do on
two cores. Who comes late there, and how long a sum takes, is decided by the system's scheduler: neither is judged.
"""

from __future__ import annotations

import statistics
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
    """Share of the time of these windows by which they would be shorter with a core for each rank; 0: not known."""
    queued_seconds: float
    """Seconds of a step for which the rank with fewest cores is ready and has none; 0: not known."""
    step_seconds: float
    rank: int
    """The rank that lacks cores most."""
    ranks: int
    """Ranks on the machine of that rank."""
    cores: int
    """Cores that these may use; 0: not known."""
    machines: int
    is_crowded: bool
    """Whether the ranks alone are more than the cores."""

    @property
    def reason(self) -> str:
        """Return who shares what: ``3 ranks share 2 cores``."""
        if self.is_crowded:
            return f"{self.ranks} ranks share {_count(self.cores, 'core')}"
        where = f", which has {_count(self.ranks, 'rank')} and {_count(self.cores, 'core')}" if self.cores else ""
        return f"other work takes cores of the machine of rank {self.rank}{where}"


def find_contention(world: Sequence[TimingEvent]) -> Contention | None:
    """Return the cores that are missing in windows of one world; None where none are, or the trainer does not tell.
    Ranks that share cores are told however little it costs, so that the verdict does not change with the noise."""
    if len(world) < FEWEST_CONTENDED:
        return None
    last, sharing = world[-1], ranks_that_share_cores(world[-1])
    told = [window for window in world if "held_up_seconds" in window.facts and window.queued]
    held_up = [float(window.facts["held_up_seconds"]) for window in told]
    costs = [lost / row.seconds for lost, row in zip(held_up, told, strict=True)]
    if not sharing and (len(told) < FEWEST_CONTENDED or not is_steadily_above(CONTENTION_SHARE, costs)):
        return None
    queued = [statistics.median(column) for column in zip(*(window.queued for window in told), strict=True)]
    rank = max(sharing or range(last.world_size), key=lambda each: queued[each] if queued else 0.0)
    machines = last.machines or (0,) * last.world_size
    lost = sum(seconds * window.steps for seconds, window in zip(held_up, told, strict=True))
    return Contention(
        share=lost / seconds_of(told) if told else 0.0,
        queued_seconds=queued[rank] if queued else 0.0,
        step_seconds=statistics.median(window.seconds for window in world),
        rank=rank,
        ranks=machines.count(machines[rank]),
        cores=last.cores[rank] if last.cores else 0,
        machines=len(set(machines)),
        is_crowded=bool(sharing),
    )


def ranks_that_share_cores(window: TimingEvent) -> tuple[int, ...]:
    """Return the ranks on machines that have more ranks than cores; none where that is not known. Ranks that compute on
    GPUs count only where the kernel does not tell for how long they had no core."""
    on_cores = window.facts.get("device", "cpu") == "cpu"
    if not window.machines or not window.cores or (window.queued and not on_cores):
        return ()
    rows = enumerate(zip(window.machines, window.cores, strict=True))
    return tuple(rank for rank, (machine, cores) in rows if 0 < cores < window.machines.count(machine))


def with_own_cores(found: Sequence[TimingEvent]) -> list[TimingEvent]:
    """Return the windows in which no ranks share cores: only these tell what communication costs."""
    return [window for window in found if not ranks_that_share_cores(window)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

"""Cores that ranks share with each other, from windows of one world. Pure.

Ranks that are more than the cores of their machine share them, as three local nodes do on two cores. Who comes late
there, and how long a sum takes, is decided by the system's scheduler: neither is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.documents.events import TimingEvent

FEWEST_CROWDED = 3
"""Windows that must tell of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contention:
    """A machine with fewer cores than ranks."""

    ranks: int
    cores: int
    """Cores that these may use."""
    machines: int
    """Machines in all."""

    @property
    def reason(self) -> str:
        """Return who shares what: ``3 ranks share 2 cores``."""
        return f"{self.ranks} ranks share {self.cores} core{'' if self.cores == 1 else 's'}"


def find_contention(world: Sequence[TimingEvent]) -> Contention | None:
    """Return the machine whose ranks share cores in windows of one world; None where none do, or the trainer does not
    tell. It is told however little it costs, so that the verdict does not change with the noise."""
    if len(world) < FEWEST_CROWDED or not (sharing := ranks_that_share_cores(world[-1])):
        return None
    last, rank = world[-1], sharing[0]
    ranks, machines = last.machines.count(last.machines[rank]), len(set(last.machines))
    return Contention(ranks=ranks, cores=last.cores[rank], machines=machines)


def ranks_that_share_cores(window: TimingEvent) -> tuple[int, ...]:
    """Return the ranks on machines that have more ranks than cores; none where that is not known, or ranks compute on
    GPUs."""
    if not window.machines or not window.cores or window.facts.get("device", "cpu") != "cpu":
        return ()
    rows = enumerate(zip(window.machines, window.cores, strict=True))
    return tuple(rank for rank, (machine, cores) in rows if 0 < cores < window.machines.count(machine))


def with_own_cores(found: Sequence[TimingEvent]) -> list[TimingEvent]:
    """Return the windows in which no ranks share cores: only these tell what communication costs."""
    return [window for window in found if not ranks_that_share_cores(window)]

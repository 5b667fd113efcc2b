"""One row in the list of jobs, as the index keeps it and as pages print it.

How a row is read from a run directory is `job_board`'s business, and how long it holds is `job_index`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain_dagster.clusters.base import JobState

ENDED = frozenset(state.value for state in JobState if state.is_final)

DAMAGED = "damaged"
"""In place of a `JobState`: of a run directory that is not as its contract has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRow:
    """One job in the list. Times are Unix seconds."""

    job_id: str
    state: str
    """A `JobState`, or `DAMAGED`."""
    started_at: float | None
    ended_at: float | None
    model: str
    step: int | None
    """The last one that was reported."""
    reason: str = ""
    """What is wrong with a damaged one."""

    @property
    def running(self) -> bool:
        return self.state not in ENDED and self.state != DAMAGED

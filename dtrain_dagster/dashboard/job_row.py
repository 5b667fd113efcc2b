"""The row of a job in the list, as the index keeps it and as pages print it.

`job_board` reads a row from a run directory; `job_index` decides how long it stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain_dagster.clusters.base import JobState

ENDED = frozenset(state.value for state in JobState if state.is_final)

DAMAGED = "damaged"
"""The state, in place of a `JobState`, of a run directory that breaks its contract."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRow:
    """A job's row in the list. Times are Unix seconds."""

    job_id: str
    state: str
    """A `JobState`, or `DAMAGED`."""
    started_at: float | None
    ended_at: float | None
    model: str
    step: int | None
    """The last reported step."""
    seconds: float | None = None
    """How long an ended job took over all launches; None where that is not recorded."""
    reason: str = ""
    """The fault of a damaged run directory."""

    @property
    def running(self) -> bool:
        """Whether the job is neither ended nor damaged."""
        return self.state not in ENDED and self.state != DAMAGED

"""Where the jobs of a fleet come from: `JobSource`. A list that is known beforehand is the simplest one.

A source is told everything that it may decide by, and decides nothing by anything else (no clock, no files of a job, no
unseeded random numbers). The runner writes down what it asked and told, in order. An orchestrator that is started again
makes a new source and repeats these calls to it, so that it comes to the same state; a job that it then gives must be
the one that it gave before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dtrain_dagster.fleet.jobs import FleetError, FleetJob, Outcome
from trainer.documents.events import EvaluationEvent


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a source thinks of a running job."""

    reason: str = ""
    """Why it is to be ended now, for people to read; "": it goes on."""

    @property
    def ends(self) -> bool:
        """Return whether the job is ended."""
        return bool(self.reason)


CONTINUE = Verdict()


class JobSource(Protocol):
    """Gives jobs to a fleet, and judges them as they run. All calls come from one thread."""

    @property
    def waiting_ahead(self) -> int:
        """How many of its jobs may wait for nodes. With 1 it is asked for a job only when the one before has begun and
        nodes are free, so that it decides as late as it can."""

    def next_job(self) -> FleetJob | None:
        """Return one more job; None where there is none now, which must change nothing, as it is not repeated to a new
        source. The fleet is over when it gives none and no job runs or can be continued."""

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> Verdict:
        """Return whether a running job goes on. ``evaluations``: all that it has had of its validation split, in order
        of steps. It is asked each time that one more has come."""

    def on_end(self, job_id: str, outcome: Outcome) -> None:
        """Take note that a job is over. It is told once for each job that it gave, in the order in which they ended."""


class ListedJobs:
    """The jobs of a list, which all wait from the beginning; none is ever ended for what it has learned."""

    waiting_ahead = sys.maxsize

    def __init__(self, jobs: Iterable[FleetJob]) -> None:
        self._left = list(jobs)
        ids = [job.job_id for job in self._left]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise FleetError(f"job {twice[0]!r} is there twice: each needs a job_id of its own")
        self._left.reverse()

    def next_job(self) -> FleetJob | None:
        """Return the next job of the list."""
        return self._left.pop() if self._left else None

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> Verdict:
        """Return that the job goes on."""
        return CONTINUE

    def on_end(self, job_id: str, outcome: Outcome) -> None:
        """Take note of nothing."""

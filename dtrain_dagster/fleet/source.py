"""Where the jobs of a fleet come from: `JobSource`. A list that is known beforehand is the simplest one.

A source remembers nothing: after the orchestrator was killed, a new one is told which jobs were given before, with what
it has noted on each (`FleetJob.facts`), and asked which ends it wants to be told again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from dtrain_dagster.fleet.jobs import FleetError, FleetJob, Outcome
from trainer.documents.events import EvaluationEvent


class JobSource(Protocol):
    """Gives jobs to a fleet, and judges them as they run. All calls come from one thread."""

    @property
    def waiting_ahead(self) -> int:
        """How many of its jobs may wait for nodes. With 1 it is asked for a job only when the one before has begun and
        nodes are free, so that it decides as late as it can."""

    def resume(self, given: Sequence[FleetJob]) -> Collection[str]:
        """Take over the jobs that were given before, in their order, and return the ids of those of whose end it has to
        be told again, if they are over. Called once, first. Raise `FleetError` where they cannot be its own."""

    def next_job(self) -> FleetJob | None:
        """Return one more job; None where there is none now. The fleet is over when it gives none and no job runs or
        can be continued."""

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> str:
        """Return why a running job is to be ended now, for people to read; "" where it goes on. ``evaluations``: all
        that it has had of its validation split, in order of steps. It is asked each time that one more has come."""

    def on_end(self, job_id: str, outcome: Outcome) -> None:
        """Take note that a job is over."""


class ListedJobs:
    """The jobs of a list, which all wait from the beginning; none is ever ended for what it has learned."""

    waiting_ahead = sys.maxsize

    def __init__(self, jobs: Iterable[FleetJob]) -> None:
        self._left = list(jobs)
        ids = [job.job_id for job in self._left]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise FleetError(f"job {twice[0]!r} is there twice: each needs a job_id of its own")
        self._left.reverse()

    def resume(self, given: Sequence[FleetJob]) -> Collection[str]:
        """Leave out what was given before."""
        known = {job.job_id for job in self._left}
        if lost := [job.job_id for job in given if job.job_id not in known]:
            raise FleetError(
                f"job {lost[0]} was given before, and is not there now: give the same jobs, or the fleet another name"
            )
        ids = {job.job_id for job in given}
        self._left = [job for job in self._left if job.job_id not in ids]
        return ()

    def next_job(self) -> FleetJob | None:
        """Return the next job of the list."""
        return self._left.pop() if self._left else None

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> str:
        """Return that the job goes on."""
        return ""

    def on_end(self, job_id: str, outcome: Outcome) -> None:
        """Take note of nothing."""

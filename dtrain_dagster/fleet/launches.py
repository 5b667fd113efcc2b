"""A launch of a job of a fleet: what it has told so far (progress, speed, evaluations, the work that is left), and what
its end means: the job is over, or is continued with its next launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.fleet.jobs import FleetState, Standing
from dtrain_dagster.jobs.progress import ran_out
from dtrain_dagster.jobs.view import JobFollower
from dtrain_dagster.planning.projection import time_left
from trainer.documents.events import EvaluationEvent, read_events
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, RESULT, RunDir

MEASURED_SPREAD = 0.1
"""Standard deviation of the work left, as a fraction of it, once a job tells its speed."""
MOST_FAILURES = 3
"""Launches in a row without a result of their own, after which a job is given up."""
PATIENCE_SECONDS = 5.0
"""Seconds until the next try after the first of them; doubled with each."""
CAME_TO_LIMIT = "it reached its limit, and saved a checkpoint"


class Followed(JobFollower):
    """A job as far as its events were read."""

    def __init__(self, rundir: RunDir) -> None:
        super().__init__(rundir)
        self.judged: dict[int, EvaluationEvent] = {}
        """The evaluations of the validation split by step; of a step that was done again, the last."""

    def look(self) -> None:
        """Read what has come since."""
        for events in self.read():
            for event in read_events(EvaluationEvent, events):
                if event.split == "valid" and event.step is not None:
                    self.judged[event.step] = event

    @property
    def evaluations(self) -> Sequence[EvaluationEvent]:
        """Return the evaluations in order of steps."""
        return tuple(self.judged[step] for step in sorted(self.judged))

    def stands(self, standing: Standing, now: float) -> Standing:
        """Return how the job stands, with what it has told since it was given its nodes last."""
        reports, launched_at = self.view.reports, standing.launched_at
        if not reports or launched_at is None or reports[-1][0] < launched_at:
            return standing
        if (left := time_left(self.view, None, now)) is not None:
            work = left.seconds * standing.job.nodes
            standing = replace(standing, left_node_seconds=work, left_spread=MEASURED_SPREAD)
        return replace(standing, is_training=True)


def judge_launch_end(
    standing: Standing, ended: JobState, now: float, message: str = "",
    has_own_result: bool = False, came_to_limit: bool = False, retry_at: float | None = None,
) -> Standing:  # fmt: skip
    """Return how a job stands after its launch has ended so. ``message``: the reason, in the words of the cluster;
    ``has_own_result``: whether the training itself says how this launch ended; ``retry_at``: Unix time at which nodes
    may be had, None where some were. Pure.

    A launch that ended by a failure of the training is the end of the job. One that ended by a failure of something
    else (its supervisor was killed, no node came) is tried again, a few times.
    """

    def means(state: FleetState, reason: str, failures: int = 0, not_before: float = 0.0) -> Standing:
        return replace(standing, state=state, reason=reason, failures=failures, not_before=not_before)

    failures = standing.failures
    if ended is JobState.SUCCEEDED:
        return means(FleetState.SUCCEEDED, "")
    if standing.state is FleetState.ENDING:
        return means(FleetState.ENDED, standing.reason)
    if came_to_limit:
        return means(FleetState.PAUSED, CAME_TO_LIMIT)
    if ended is JobState.CANCELLED:
        if standing.state is FleetState.PAUSING:
            return means(FleetState.PAUSED, standing.reason)
        return means(FleetState.ENDED, "a person cancelled it")
    if retry_at is not None:
        return means(FleetState.PAUSED, message, failures, retry_at)
    if has_own_result or failures + 1 >= MOST_FAILURES:
        return means(FleetState.FAILED, message, failures + 1)
    return means(FleetState.PAUSED, message, failures + 1, now + PATIENCE_SECONDS * 2**failures)


def explain_launch_end(standing: Standing, rundir: RunDir, status: JobStatus, now: float) -> Standing:
    """Return how a job stands after its last launch, as `judge_launch_end` does."""
    try:
        result, launch = rundir.read_json(RESULT) or {}, rundir.read_json(LAUNCH) or {}
        is_its = result.get("launch") in (None, launch.get("launch"))
        own, spent = result.get("status") == "failed" and is_its, ran_out(rundir)
    except DamagedError as error:
        return replace(standing, state=FleetState.FAILED, reason=str(error), failures=0, not_before=0.0)
    return judge_launch_end(
        standing,
        status.state,
        now,
        message=str(result.get("error") or status.message) if own else status.message,
        has_own_result=own,
        came_to_limit=spent,
        retry_at=status.starved.retry_at if status.starved else None,
    )

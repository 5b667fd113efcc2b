"""A launch of a job of a fleet: what it has told so far (progress, speed, evaluations, the work that is left), and what
its end means: the job is over, or is continued with its next launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.fleet.grants import Standing
from dtrain_dagster.fleet.jobs import FleetJob, FleetState
from dtrain_dagster.fleet.records import KeptState
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

    def trains_since(self, launched_at: float | None) -> bool:
        """Return whether it has told of a step since then."""
        return bool(self.view.reports) and launched_at is not None and self.view.reports[-1][0] >= launched_at

    def work_left(self, job: FleetJob, nodes: int, now: float) -> float | None:
        """Return the work that is left, as node-seconds on one node, of a job that trains on this many. None while that
        is not known."""
        left = time_left(self.view, None, now)
        return None if left is None else left.seconds / (job.serial_share + (1 - job.serial_share) / nodes)

    def stands(self, standing: Standing, now: float) -> Standing:
        """Return how the job stands, with what it has told since it was given its nodes last."""
        if not self.trains_since(standing.launched_at):
            return standing
        left = self.work_left(standing.job, standing.nodes, now)
        if left is not None:
            standing = replace(standing, left_node_seconds=left, left_spread=MEASURED_SPREAD)
        return replace(standing, is_training=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnd:
    """What the end of a launch means."""

    state: FleetState
    reason: str = ""
    failures: int = 0
    not_before: float = 0.0


def judge_launch_end(
    state: JobState, was: FleetState, asked: str, failures: int, now: float, message: str = "",
    has_own_result: bool = False, came_to_limit: bool = False, retry_at: float | None = None,
) -> LaunchEnd:  # fmt: skip
    """Return what the end of a launch means for its job. ``was``: its state in the fleet, and ``asked``: why it was to
    leave its nodes, if it was. ``failures``: those before, in a row. ``message``: the reason, in the words of the
    cluster; ``has_own_result``: whether the training itself says how this launch ended; ``retry_at``: Unix time at
    which nodes may be had, None where some were. Pure.

    A launch that ended by a failure of the training is the end of the job. One that ended by a failure of something
    else (its supervisor was killed, no node came) is tried again, a few times.
    """
    if state is JobState.SUCCEEDED:
        return LaunchEnd(state=FleetState.SUCCEEDED)
    if was is FleetState.ENDING:
        return LaunchEnd(state=FleetState.ENDED, reason=asked)
    if came_to_limit:
        return LaunchEnd(state=FleetState.PAUSED, reason=CAME_TO_LIMIT)
    if state is JobState.CANCELLED:
        if was is FleetState.PAUSING:
            return LaunchEnd(state=FleetState.PAUSED, reason=asked)
        return LaunchEnd(state=FleetState.ENDED, reason="a person cancelled it")
    if retry_at is not None:
        return LaunchEnd(state=FleetState.PAUSED, reason=message, failures=failures, not_before=retry_at)
    if has_own_result or failures + 1 >= MOST_FAILURES:
        return LaunchEnd(state=FleetState.FAILED, reason=message, failures=failures + 1)
    wait = PATIENCE_SECONDS * 2**failures
    return LaunchEnd(state=FleetState.PAUSED, reason=message, failures=failures + 1, not_before=now + wait)


def explain_launch_end(rundir: RunDir, status: JobStatus, kept: KeptState, now: float) -> LaunchEnd:
    """Return what the end of the job's last launch means, as `judge_launch_end` does."""
    try:
        result, launch = rundir.read_json(RESULT) or {}, rundir.read_json(LAUNCH) or {}
        is_its = result.get("launch") in (None, launch.get("launch"))
        own, spent = result.get("status") == "failed" and is_its, ran_out(rundir)
    except DamagedError as error:
        return LaunchEnd(state=FleetState.FAILED, reason=str(error))
    return judge_launch_end(
        status.state,
        kept.state,
        kept.reason,
        kept.failures,
        now,
        message=str(result.get("error") or status.message) if own else status.message,
        has_own_result=own,
        came_to_limit=spent,
        retry_at=status.starved.retry_at if status.starved else None,
    )

"""What the end of a launch means for its job."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Standing
from dtrain_dagster.fleet.runner import judge_launch_end

RUNNING, PAUSING, ENDING = FleetState.RUNNING, FleetState.PAUSING, FleetState.ENDING


@pytest.mark.parametrize(
    ("state", "facts", "was", "failures", "means"),
    [
        (JobState.SUCCEEDED, {}, PAUSING, 0, ("succeeded", "", 0)),
        (JobState.CANCELLED, {}, PAUSING, 1, ("paused", "asked", 0)),
        (JobState.CANCELLED, {}, ENDING, 0, ("ended", "asked", 0)),
        (JobState.CANCELLED, {}, RUNNING, 0, ("ended", "a person cancelled it", 0)),
        (JobState.FAILED, {"came_to_limit": True}, RUNNING, 1, ("paused", "it reached its limit, and saved", 0)),
        (JobState.FAILED, {"has_own_result": True}, RUNNING, 0, ("failed", "why", 1)),
        (JobState.FAILED, {}, RUNNING, 0, ("paused", "why", 1)),
        (JobState.FAILED, {}, RUNNING, 2, ("failed", "why", 3)),
        (JobState.FAILED, {"retry_at": 900.0}, RUNNING, 2, ("paused", "why", 2)),
    ],
)
def test_only_its_own_failure_or_many_of_others_end_a_job(
    state: JobState, facts: dict[str, Any], was: FleetState, failures: int, means: tuple[str, str, int]
):
    job = FleetJob(job_id="a", node_seconds=1.0)
    before = Standing(job=job, number=0, state=was, reason="asked", failures=failures, not_before=9.0)
    end = judge_launch_end(before, state, 100.0, message="why", **facts)
    assert (str(end.state), end.failures) == (means[0], means[2])
    assert end.reason.startswith(means[1])
    assert bool(end.not_before) == (end.state is FleetState.PAUSED and end.failures > 0)

"""Long operations whose answers say nothing of how long to wait: who waits how long, by the emulator's clock alone."""

from __future__ import annotations

from typing import Any

import pytest
from azure.core.polling.base_polling import LROBasePolling

from dtrain_dagster.clusters.base import JobState
from harness.waiting import until
from tests.azure.stage import V100, Stage, end

CREATED_AFTER, DELETED_AFTER = 75.0, 40.0


@pytest.fixture
def waits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each wait so far. A wait moves the emulator's clock, and takes no time."""
    seen: list[float] = []

    def skip(_: Any, delay: float) -> None:
        seen.append(delay)
        stage.control("clock", advance_seconds=delay)

    monkeypatch.setattr(LROBasePolling, "_sleep", skip)
    return seen


@pytest.mark.long
def test_computes_are_asked_after_as_often_as_the_settings_say(stage: Stage, waits: list[float]) -> None:
    stage.control("timing", create_seconds=CREATED_AFTER, delete_seconds=DELETED_AFTER)
    try:
        manager = stage.manager(polling_interval_seconds=5)
        got = manager.provision_cluster(2, V100)
        assert got.max_nodes == 2
        assert waits == [5.0] * 15, "75 seconds, and nobody waits for half a minute"
        assert manager.scale_cluster(3), "a change is answered with 201 and Creating, too"
        assert waits == [5.0] * 30
        manager.cleanup_cluster()
        assert waits == [5.0] * 38
    finally:
        stage.control("timing", create_seconds=0.3, delete_seconds=0.2)
    said = [
        seen
        for seen in stage.control("requests", operation="operation.get")
        if "computeOperationsStatus" in seen["path"]
    ]
    assert len(said) >= 38
    assert not stage.control("requests", operation="unknown"), "no address that the service has not told"


@pytest.mark.long
def test_a_job_that_has_ended_is_cancelled_without_an_error(stage: Stage) -> None:
    manager, spec = stage.run()
    assert end(manager, spec).state is JobState.SUCCEEDED
    until(lambda: stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Completed", "the end in the service")
    manager.jobs.cancel(f"{spec.job_id}-l1", "again")
    [seen] = stage.asked("job.cancel")
    assert seen["status"] == 200
    assert stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Completed"

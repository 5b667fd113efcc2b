"""What exists, and is answered 404 for a while; what is gone; and a workspace that is not there: with the real clients
against the emulator."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.client import NotFound, ScopeMissing
from dtrain_dagster.clusters.azure_ml.launch_record import Launches
from dtrain_dagster.clusters.base import ClusterError, JobState, JobStatus
from harness.waiting import until
from tests.azure.stage import FOREVER, LAST_ONE_DONE, V100, WAITS, Stage, end
from trainer.rundir import LAUNCH, RunDir

pytestmark = pytest.mark.slow
LONG = {"missing_seconds": 60.0}


def is_running(stage: Stage, manager: Any, spec: Any) -> None:
    until(lambda: stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Running", "the job to run")
    assert manager.job_status(spec.job_id).state is JobState.RUNNING


def look_until(manager: Any, spec: Any, words: str) -> JobStatus:
    def found() -> JobStatus | None:
        status: JobStatus = manager.job_status(spec.job_id)
        assert not status.state.is_final, status.message
        return status if words in status.message else None

    status: JobStatus = until(found, f"the words «{words}»")
    return status


def test_a_running_job_outlives_answers_that_it_is_not_there(stage: Stage) -> None:
    manager, spec = stage.run(WAITS, **LONG)
    is_running(stage, manager, spec)
    stage.control("fault", fault="hide", name=f"{spec.job_id}-l1", by="get", seconds=1.5)
    status = look_until(manager, spec, "has not known it for")
    assert status.state is JobState.RUNNING, "as it was seen last"
    until(lambda: not manager.job_status(spec.job_id).message, "it to be known again")
    assert not stage.asked("job.cancel")
    RunDir(spec.run_dir).write_json("go.json", {"go": True})
    assert end(manager, spec).state is JobState.SUCCEEDED
    assert list(stage.jobs()) == [f"{spec.job_id}-l1"]
    assert RunDir(spec.run_dir).read_json(LAUNCH)["missing_since"] is None


def test_a_job_that_stays_unknown_is_cancelled_before_it_is_given_up(stage: Stage) -> None:
    """The first look is in the launch record, so another orchestrator goes on from there."""
    manager, spec = stage.run(FOREVER, missing_seconds=2.0)
    is_running(stage, manager, spec)
    began = time.time()
    stage.control("fault", fault="hide", name=f"{spec.job_id}-l1", by="all", seconds=3600)

    def noted() -> float | None:  # not right after the job was asked for
        look_until(manager, spec, "has not known it for")
        return RunDir(spec.run_dir).read_json(LAUNCH)["missing_since"]  # type: ignore[no-any-return]

    since = until(noted, "a look that counts")
    status = end(stage.manager(run="run-2", missing_seconds=2.0), spec)
    assert time.time() - began >= 2.0
    assert status.state is JobState.FAILED
    assert "deleted from the workspace" in status.message
    assert RunDir(spec.run_dir).read_json(LAUNCH)["missing_since"] == since
    assert len(stage.asked("job.cancel")) == 1
    stage.control("clear")
    assert manager.jobs.end(f"{spec.job_id}-l1", "the end of the test", time.monotonic() + 30)


def test_a_job_that_stays_unknown_though_its_cancellation_is_taken_is_gone_on_with(stage: Stage) -> None:
    manager, spec = stage.run(LAST_ONE_DONE, missing_seconds=1.0)
    is_running(stage, manager, spec)
    stage.control("fault", fault="hide", name=f"{spec.job_id}-l1", by="get", seconds=3600)
    assert end(manager, spec).state is JobState.SUCCEEDED
    assert {name: job["status"] for name, job in stage.jobs().items()} == {
        f"{spec.job_id}-l1": "Canceled", f"{spec.job_id}-l2": "Completed",
    }  # fmt: skip
    assert len(stage.asked("job.cancel")) == 2
    stage.control("clear")


def test_a_launch_that_another_has_replaced_meanwhile_is_not_settled(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, spec = stage.run(FOREVER, missing_seconds=0.5)
    is_running(stage, manager, spec)
    stage.control("fault", fault="hide", name=f"{spec.job_id}-l1", by="all", seconds=3600)
    launches = Launches(RunDir(spec.run_dir))

    def cancel(*_: Any) -> bool:
        launches.update(lambda record: {**record, "token": "of another"})
        return False

    with monkeypatch.context() as patch:
        patch.setattr(manager.jobs, "cancel", cancel)
        while (launches.read()[1] or {})["token"] != "of another":
            assert not manager.job_status(spec.job_id).state.is_final
    stage.control("clear")
    manager.cancel_job(spec.job_id)


def test_a_first_look_of_hours_ago_proves_nothing(stage: Stage) -> None:
    """An orchestrator that slept wakes up in the middle of another outage."""
    manager, spec = stage.run(WAITS, missing_seconds=1.0)
    is_running(stage, manager, spec)
    token = RunDir(spec.run_dir).read_json(LAUNCH)["token"]
    time.sleep(1.0)  # it was asked for just now
    manager._controller(spec.job_id).launches.change(token, missing_since=time.time() - 7200)
    stage.control("fault", fault="hide", name=f"{spec.job_id}-l1", by="all", seconds=3600)
    woken = stage.manager(run="run-2", missing_seconds=1.0)
    assert "has not known it for 0 s" in woken.job_status(spec.job_id).message
    assert not stage.asked("job.cancel")
    stage.control("clear")
    RunDir(spec.run_dir).write_json("go.json", {"go": True})
    assert end(woken, spec).state is JobState.SUCCEEDED
    assert list(stage.jobs()) == [f"{spec.job_id}-l1"]


def test_a_submission_that_finds_no_workspace_settles_nothing(stage: Stage) -> None:
    manager = stage.manager(patience_seconds=0.2, look_patience_seconds=0.2)
    manager.provision_cluster(2, V100)
    spec = stage.spec(manager)
    gone = {"status": 404, "code": "ResourceGroupNotFound", "message": "Resource group 'dtrain-rg' could not be found."}
    stage.control("fault", fault="error", operation="job.*", count=None, moment="after", **gone)
    with pytest.raises(ScopeMissing):
        manager.submit_job(spec)
    assert not manager.job_status(spec.job_id).state.is_final
    stage.control("clear")
    assert end(stage.manager(run="run-2"), spec).state is JobState.SUCCEEDED
    assert list(stage.jobs()) == [f"{spec.job_id}-l1"], "what was made, though the answer said 404, is not bought twice"


@pytest.mark.long
def test_a_cancellation_is_not_confirmed_by_answers_that_there_is_no_job(stage: Stage) -> None:
    manager, spec = stage.run(FOREVER, **LONG)
    is_running(stage, manager, spec)
    stage.control("fault", fault="hide", name=f"{spec.job_id}-l1", by="all", seconds=4)
    with pytest.raises(ClusterError, match="is not confirmed"):
        stage.manager(**LONG, cancel_seconds=1.0).cancel_job(spec.job_id)
    assert stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Running"
    manager = stage.manager(**LONG)
    manager.cancel_job(spec.job_id)
    assert stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Canceled"
    assert manager.job_status(spec.job_id).state is JobState.CANCELLED


def test_a_404_that_does_not_name_the_job_gives_no_job_up(stage: Stage) -> None:
    manager, spec = stage.run(WAITS, missing_seconds=0.5)
    is_running(stage, manager, spec)
    fault = {"fault": "error", "operation": "job.get", "status": 404, "count": 8}
    stage.control("fault", **fault, code="ResourceNotFound", message="Not found")
    look_until(manager, spec, "cannot be seen now")
    with pytest.raises(NotFound):
        manager.jobs.get(f"{spec.job_id}-l1")
    stage.control("clear")
    RunDir(spec.run_dir).write_json("go.json", {"go": True})
    assert end(manager, spec).state is JobState.SUCCEEDED


def test_a_workspace_that_is_away_settles_no_job_and_names_its_setting(stage: Stage) -> None:
    manager, spec = stage.run(WAITS, missing_seconds=0.3, look_patience_seconds=0.3)
    is_running(stage, manager, spec)
    gone = {"status": 404, "code": "ResourceGroupNotFound", "message": "Resource group 'dtrain-rg' could not be found."}
    stage.control("fault", fault="error", operation="*", count=None, **gone)
    began, looks = time.monotonic(), 0
    while looks < 4 or time.monotonic() - began < 1.0:  # often and long enough for one that is gone
        status, looks = look_until(manager, spec, "DTRAIN_AZURE_RESOURCE_GROUP"), looks + 1
    assert status.state is JobState.RUNNING
    assert "ResourceGroupNotFound" in status.message
    stage.control("clear")
    until(lambda: not manager.job_status(spec.job_id).message, "the workspace to be there")
    RunDir(spec.run_dir).write_json("go.json", {"go": True})
    assert end(manager, spec).state is JobState.SUCCEEDED
    assert list(stage.jobs()) == [f"{spec.job_id}-l1"]


def test_a_workspace_of_another_name_is_told_with_its_setting(stage: Stage) -> None:
    for name, wrong, setting in (
        ("workspace", "elsewhere", "DTRAIN_AZURE_WORKSPACE"),
        ("resource_group", "elsewhere", "DTRAIN_AZURE_RESOURCE_GROUP"),
        ("subscription_id", "00000000-0000-4000-8000-0000000000ff", "DTRAIN_AZURE_SUBSCRIPTION_ID"),
    ):
        manager = stage.manager(**{name: wrong})
        with pytest.raises(ScopeMissing, match=f"'{wrong}' is not found .*Check {setting}"):
            manager.jobs.get("any-job")
        with pytest.raises(ClusterError, match=setting):
            manager.provision_cluster(1, V100)


def test_what_was_made_just_now_may_be_unknown_for_a_while(stage: Stage) -> None:
    """The compute is used, not passed over; the job is neither given up nor bought again."""
    stage.control("timing", visible_seconds=1.5, listed_seconds=2.0)
    manager, spec = stage.run(start_seconds=30.0)
    assert [attempt.decision for attempt in manager.attempts] == ["created"]
    status = end(manager, spec)
    assert status.state is JobState.SUCCEEDED, status.message
    assert list(stage.jobs()) == [f"{spec.job_id}-l1"]
    assert len(stage.computes()) == 1


def test_a_compute_that_lists_do_not_have_yet_is_not_made_smaller(stage: Stage) -> None:
    manager = stage.manager()
    manager.provision_cluster(4, V100)
    [name] = stage.computes()
    stage.control("fault", fault="hide", resource="compute", name=name, by="list", seconds=3600)
    before = len(stage.asked("compute.put"))
    other = stage.manager(run="run-2")
    other.provision_cluster(2, V100)
    assert [attempt.decision for attempt in other.attempts] == ["reused"]
    assert len(stage.asked("compute.put")) == before


def test_a_compute_that_is_not_found_for_a_while_is_not_given_up(stage: Stage) -> None:
    manager = stage.manager()
    manager.provision_cluster(2, V100)
    [pool] = manager.pools()
    stage.control("fault", fault="hide", resource="compute", name=pool.name, by="get", seconds=2)
    assert not manager.scale_down(pool), "one answer is no proof that it is gone"
    assert list(stage.computes()) == [pool.name]


def test_why_a_job_failed_is_asked_again_where_its_history_is_not_there_yet(stage: Stage) -> None:
    stage.control("fault", fault="lose", job=f"{stage.name}-job-l1", node=1, log="in launch 1")
    gone = {"status": 404, "code": "UserError", "message": f"Run {stage.name}-job-l1 was not found"}
    stage.control("fault", fault="error", operation="history.details", count=2, **gone)
    manager, spec = stage.run(LAST_ONE_DONE)
    assert end(manager, spec).state is JobState.SUCCEEDED
    assert len(stage.jobs()) == 2

"""Tags and properties that the service adds to a job disturb none of ours, and ours none of theirs."""

from __future__ import annotations

from dtrain_dagster.clusters.azure_ml.jobs import JOB_TAG, RUN_TAG, tags
from dtrain_dagster.clusters.base import JobState
from harness.azure.emulator.system_marks import TAGS
from harness.waiting import until
from tests.azure.stage import FOREVER, Stage, end


def test_our_tags_are_read_among_those_of_the_service(stage: Stage) -> None:
    manager, spec = stage.run(FOREVER)
    record = manager._record(spec.job_id)
    assert record is not None
    name = record["job_name"]
    seen = manager.jobs.get(name)
    assert seen is not None
    assert dict(seen.tags) == {**tags(record), **TAGS}
    assert [job.name for job in manager.jobs.active()] == [name]
    assert stage.manager().find_orphans({"run-1"}) == []
    [orphan] = stage.manager("run-2").find_orphans(())
    assert (orphan.name, orphan.job_id, orphan.dagster_run_id) == (name, spec.job_id, "run-1")
    manager.submit_job(spec)  # again, by a process that did not get the answer
    assert len(stage.jobs()) == 1
    manager.service.ml.jobs.archive(name)  # a person writes the job back, with all its tags
    again = manager.jobs.get(name)
    assert again is not None
    assert (again.tags[JOB_TAG], again.tags[RUN_TAG]) == (spec.job_id, "run-1")
    until(lambda: manager.job_status(spec.job_id).state is JobState.RUNNING, "the job to run")
    manager.cancel_job(spec.job_id)
    assert end(manager, spec).state is JobState.CANCELLED

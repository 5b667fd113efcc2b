"""Jobs of other people, of every kind, beside ours: they hide none of ours, and none of them is touched."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.jobs import read_job, tags
from dtrain_dagster.clusters.base import JobState
from harness.azure.emulator.foreign_jobs import FOREIGN, foreign_jobs
from harness.azure.emulator.system_marks import TAGS
from harness.waiting import until
from tests.azure.stage import FOREVER, Stage


def test_jobs_of_every_kind_are_listed_beside_ours_and_a_copy_of_ours_is_not_ours(stage: Stage) -> None:
    """The service adds tags of its own, and the Studio's «resubmit» copies a job with its tags, under another name."""
    from azure.ai.ml import command
    from azure.ai.ml.entities import Environment

    manager, spec = stage.run(FOREVER)
    name, record = f"{spec.job_id}-l1", manager._record(spec.job_id) or {}
    listed = {job.name: job for job in manager.jobs.every_job()}
    theirs = {name for name in listed if name.startswith(FOREIGN)}
    assert theirs == {job["name"] for job in foreign_jobs(0.0)}
    assert dict(listed[name].tags) == {**tags(record), **TAGS}
    assert listed[f"{FOREIGN}quantumannealing"].status == "Superposed"
    [compute] = stage.computes()
    assert manager.jobs.on_compute(compute) == [name]
    assert manager.jobs.on_compute("their-young-cluster") == [f"{FOREIGN}command", f"{FOREIGN}sweep"]
    assert [job.name for job in manager.jobs.active()] == [name]
    [orphan] = stage.manager("run-2").find_orphans(())
    assert (orphan.name, orphan.job_id, orphan.dagster_run_id) == (name, spec.job_id, "run-1")
    manager.service.ml.jobs.archive(name)  # a person writes the job back, with all its tags
    manager.submit_job(spec)  # again, by a process that did not get the answer
    assert len(stage.jobs()) == 1
    until(lambda: manager.job_status(spec.job_id).state is JobState.RUNNING, "the job to run")
    copied = f"{stage.name}-witty-owl"
    stage.control("fault", fault="queue", job=copied)
    resubmitted = command(
        name=copied, command=f"{sys.executable} -c pass", compute=compute, tags=tags(record),
        environment=Environment(image="x/y:1"),
    )  # fmt: skip
    manager.service.ml.jobs.create_or_update(resubmitted)
    assert {job.name for job in manager.jobs.active()} >= {copied}
    assert manager.find_orphans({"run-1"}) == []
    manager.cancel_job(spec.job_id)
    assert stage.jobs()[copied]["status"] not in ("Canceled", "CancelRequested")
    manager.service.ml.jobs.begin_cancel(copied).wait()


@pytest.mark.parametrize("found", [{"name": "child"}, {"name": "child", "properties": None}])
def test_a_job_without_properties_is_read_as_empty(found: dict[str, Any]) -> None:
    job = read_job(found)
    assert (job.name, job.status, job.tags, job.compute) == ("child", "Unknown", {}, "")

"""What the manager says of its cluster and jobs, from records that the test writes; no process runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtrain_dagster.clusters.base import OWNER, ClusterError, JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from dtrain_dagster.support.job_lock import acquire
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, STATUS, RunDir

Plant = Callable[..., RunDir]


@pytest.fixture
def manager(tmp_path: Path) -> LocalClusterManager:
    return LocalClusterManager(tmp_path / "home")


@pytest.fixture
def plant(manager: LocalClusterManager) -> Iterator[Plant]:
    """Write the records of a job; one that runs has its lock held, as by its supervisor."""
    locks: list[int] = []

    def write(job_id: str, state: JobState = JobState.RUNNING, has_mark: bool = True) -> RunDir:
        rundir, ended_at = manager.rundir(job_id), None if state is JobState.RUNNING else 2.0
        rundir.make()
        rundir.write_json(LAUNCH, {"job_id": job_id, "launch": 1, "submitted_at": 1.0})
        rundir.write_json(
            STATUS, {"job_id": job_id, "state": state, "message": "", "started_at": 1.0, "ended_at": ended_at, "pid": 1}
        )
        if ended_at is None:
            locks.append(acquire(rundir.storage.local_path()) or -1)
        if has_mark:
            manager.active.enter(job_id)
        return rundir

    yield write
    for lock in locks:
        os.close(lock)


def test_a_job_is_of_the_cluster_that_launched_it_last(manager: LocalClusterManager, plant: Plant) -> None:
    here, there = (LocalClusterManager(manager.home, LaunchSettings(cluster_name=name)) for name in ("here", "there"))
    here.provision_cluster(1, "Standard_NC6s_v3")
    there.provision_cluster(2, "Standard_NC24ads_A100_v4")
    rundir = plant("job")
    rundir.write_json(OWNER, {"dagster_run_id": "a run that has ended"})
    rundir.write_json(LAUNCH, {"job_id": "job", "launch": 1, "cluster_name": "here"})
    assert [job.job_id for job in here.active_jobs()] == [job.job_id for job in here.list_jobs()] == ["job"]
    assert here.pools()[0].work == ("job",)
    assert [orphan.name for orphan in here.find_orphans(())] == ["job"]
    assert not there.active_jobs()
    assert not there.list_jobs()
    assert not there.find_orphans(())
    assert not there.monitor_health().running_jobs
    [pool] = there.pools()
    assert (pool.work, pool.node_count, pool.sku) == ((), 2, "Standard_NC24ads_A100_v4")
    assert there.scale_down(pool), "it idles, whatever runs elsewhere"
    there.cleanup_cluster()
    assert there.monitor_health().message == "not provisioned"
    assert there.job_status("job").state is JobState.RUNNING, "it is found by its name, and was not ended"
    rundir.write_json(LAUNCH, {"job_id": "job", "launch": 2, "cluster_name": "there"})
    there.active.enter("job")
    assert [job.job_id for job in there.active_jobs()] == ["job"], "it goes on elsewhere, and is of that cluster"
    assert not here.active_jobs()
    assert not here.pools()[0].work


def test_scaling_is_remembered_within_its_limits(manager: LocalClusterManager) -> None:
    with pytest.raises(ClusterError, match="not provisioned"):
        manager.scale_cluster(2)
    config = manager.provision_cluster(2, "Standard_NC6s_v3")
    assert manager.scale_cluster(3)
    assert not manager.scale_cluster(3)
    assert len(LocalClusterManager(manager.home).monitor_health().nodes) == 3
    with pytest.raises(ClusterError, match=f"0 to {config.max_nodes}"):
        manager.scale_cluster(config.max_nodes + 1)


def test_health_says_which_node_works_on_what_and_which_left(manager: LocalClusterManager, plant: Plant) -> None:
    assert manager.monitor_health().message == "not provisioned"
    manager.provision_cluster(3, "Standard_NC6s_v3")
    assert [node.message for node in manager.monitor_health().nodes] == ["ready"] * 3
    rundir, now = plant("work"), time.time()
    rundir.write_node(NodePresence(node_id=0, launch=1, started_at=now, last_seen_at=now))
    rundir.write_node(NodePresence(node_id=1, launch=1, started_at=now, ended_at=now, exit_codes=(5,)))
    health = manager.monitor_health()
    assert (health.healthy, health.running_jobs) == (False, ("work",))
    assert [node.message for node in health.nodes] == ["works on work", "left work with exit codes 5", "ready"]
    assert [node.healthy for node in health.nodes] == [True, False, True]
    assert manager.job_status("work").nodes_alive == 1


def test_a_submitter_that_dies_before_the_start_leaves_a_job_that_never_started(manager: LocalClusterManager) -> None:
    rundir = manager.rundir("unborn")
    rundir.make()
    rundir.write_json(LAUNCH, {"submitted_at": 1.0})
    lock = acquire(rundir.storage.local_path())
    assert lock is not None
    assert manager.job_status("unborn").state is JobState.QUEUED
    os.close(lock)
    status = manager.job_status("unborn")
    assert (status.state, "never started" in status.message) == (JobState.FAILED, True)


def test_the_mark_of_a_job_goes_when_somebody_sees_its_end(manager: LocalClusterManager, plant: Plant) -> None:
    assert manager.active_jobs() == []
    plant("long")
    plant("short", JobState.SUCCEEDED)
    manager.active.enter("of-a-folder-that-was-removed")
    secrets = manager.home / "secrets"
    secrets.mkdir(parents=True)
    for name in ("long", "short", "short.engine.json", "of-a-folder-that-was-removed"):
        (secrets / name).touch()
    assert [job.job_id for job in manager.active_jobs()] == ["long"]
    left = sorted(path.name for path in secrets.iterdir())
    assert left == ["long", "of-a-folder-that-was-removed"], "a supervisor that was killed removes none"
    assert manager.active.marks() == ["long"]
    assert manager.use.used_at() == 2.0


def test_a_job_that_is_started_again_keeps_its_mark_whoever_sees_the_last_end_late(
    manager: LocalClusterManager, plant: Plant
) -> None:
    assert manager.active_jobs() == []
    rundir = plant("job", JobState.FAILED)
    lock = acquire(rundir.storage.local_path())  # of who starts it
    assert lock is not None
    assert manager.active_jobs() == []
    assert manager.active.marks() == ["job"]
    os.close(lock)
    assert manager.active_jobs() == []
    assert manager.active.marks() == []


def test_jobs_from_before_there_were_marks_are_found(manager: LocalClusterManager, plant: Plant) -> None:
    plant("long", has_mark=False)
    plant("short", JobState.SUCCEEDED, has_mark=False)
    assert [job.job_id for job in manager.active_jobs()] == ["long"]
    assert manager.active.marks() == ["long"]
    assert json.loads(manager.active.storage.read("long"))["at"] > 0


def test_clean_up_asks_each_job_to_end_though_one_cannot_be_asked(
    manager: LocalClusterManager, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    def end(job_id: str, patience_seconds: float) -> bool:
        asked.append((job_id, patience_seconds))
        raise ClusterError("its supervisor does not start")

    plant("one")
    plant("two")
    monkeypatch.setattr(manager, "_end", end)
    with pytest.raises(ClusterError, match="does not start"):
        manager.cleanup_cluster()
    assert {("one", 0.0), ("two", 0.0)} <= set(asked)

"""Jobs of an Azure ML cluster against the emulator, with the real clients: what becomes of them, what is left."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from dtrain_dagster.clusters.base import ClusterError, InUseError, JobState, JobStatus, NoCapacityError
from dtrain_dagster.costs.plan import write_limit
from dtrain_dagster.costs.prices import price_of
from harness.waiting import until
from tests.azure.stage import A100, DONE, FAILS, FOREVER, LAST_ONE_DONE, V100, WAITS, Stage, end
from tests.webhook import web_hook
from trainer.comm.launch_secret import read_launch_secret
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, LIMIT, STATUS, RunDir
from trainer.runtime.launch import Launch
from trainer.storage.open import open_storage

pytestmark = pytest.mark.slow


def test_runs_where_the_nodes_were_got_and_says_so(stage: Stage) -> None:
    stage.control("fault", fault="refuse", vm_size=V100, how="sync")
    manager, spec = stage.run()
    assert end(manager, spec).state is JobState.SUCCEEDED
    rundir = RunDir(spec.run_dir)
    launch = rundir.read_json(LAUNCH)
    assert (launch["sku"], launch["tier"], launch["launch"]) == (A100, "dedicated", 1)
    assert launch["studio_url"].startswith("https://ml.azure.com/runs/")
    assert [attempt.decision for attempt in manager.attempts] == ["next", "created"]
    assert "rank 1 of 2 in launch 1" in manager.job_logs(spec.job_id, node_id=1)
    assert "=== node-0.log ===" in stage.manager().job_logs(spec.job_id, tail=1)
    assert [status.job_id for status in stage.manager().list_jobs()] == [spec.job_id]
    with pytest.raises(ClusterError, match="no log of a node 7"):
        manager.job_logs(spec.job_id, node_id=7)
    with pytest.raises(ClusterError, match="no job"):
        manager.job_status("never-heard-of")
    sent = stage.asked("job.put")[0]["body"]["properties"]
    told = Launch.read(sent["environmentVariables"])
    assert (told.number, told.is_elastic, told.records_presence) == (1, True, True)
    assert sent["distribution"]["distributionType"] == "PyTorch"
    assert sent["environmentVariables"]["NCCL_SOCKET_IFNAME"] == "eth"
    assert sent["resources"]["shmSize"] == "2g"
    assert sent["tags"]["dagster_run_id"] == "run-1"


def test_nodes_read_the_secret_of_their_launch_where_no_reader_of_the_workspace_does(stage: Stage) -> None:
    """Its address is among the job's variables, which many may look at; the file goes with the launch."""
    stage.storage = stage.emulator.environment["DTRAIN_STORAGE"]
    manager, spec = stage.run(WAITS)
    rundir = RunDir(spec.run_dir)
    [sent] = stage.asked("job.put")
    variables = sent["body"]["properties"]["environmentVariables"]
    folder, _, name = Launch.read(variables).secret_uri.rpartition("/")
    assert not folder.startswith(spec.run_dir)
    secret = open_storage(folder).read(name).decode()
    assert read_launch_secret(variables).value == bytes.fromhex(secret)
    assert len(secret) == 64
    assert secret not in json.dumps(sent)
    assert secret not in json.dumps(rundir.read_json(LAUNCH))
    rundir.write_json("go.json", {"go": True})
    assert end(manager, spec).state is JobState.SUCCEEDED
    assert not open_storage(folder).exists(name)


def test_is_bought_once_whoever_asks_and_whatever_answers_are_lost(stage: Stage) -> None:
    for _ in range(2):
        stage.control("fault", fault="drop", operation="job.put", moment="after")
    manager, spec = stage.run(FOREVER)
    others = [stage.manager(run=f"run-{number}") for number in range(2)]
    threads = [threading.Thread(target=other.submit_job, args=(spec,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager.submit_job(spec)
    assert list(stage.jobs()) == [f"{spec.job_id}-l1"]
    manager.cancel_job(spec.job_id)
    assert manager.job_status(spec.job_id).state is JobState.CANCELLED
    assert stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Canceled"


def test_one_that_was_cancelled_or_failed_is_submitted_again_as_its_next_launch(stage: Stage) -> None:
    manager, spec = stage.run(FAILS)
    failed = end(manager, spec)
    assert failed.state is JobState.FAILED
    assert "rank" in failed.message
    assert len(stage.jobs()) == 1, "what fails by itself is not submitted again by itself"
    manager.submit_job(stage.spec(manager, DONE))
    assert end(manager, spec).state is JobState.SUCCEEDED
    manager.submit_job(spec)
    assert list(stage.jobs()) == [f"{spec.job_id}-l1", f"{spec.job_id}-l2"]
    log = manager.job_logs(spec.job_id, node_id=0)
    assert "launch 1" in log
    assert "launch 2" in log


def test_people_are_told_once_of_each_launch_and_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever manager sees it, one that only looks included."""
    with web_hook() as (url, heard):
        monkeypatch.setenv("DTRAIN_NOTIFY", url)
        manager, spec = stage.run(FAILS)
        others = [stage.manager(run=None, tends=False) for _ in range(2)]
        threads = [threading.Thread(target=end, args=(other, spec)) for other in (manager, *others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        manager.submit_job(stage.spec(manager, DONE))
        assert end(manager, spec).state is JobState.SUCCEEDED
    titles = [item["title"] for item in heard]
    told = [f"dtrain: {spec.job_id} {what}" for what in ("has failed", "goes on: launch 2", "has finished")]
    assert titles == told
    assert "list price, not the bill" in heard[-1]["message"]


def test_people_are_told_once_that_a_launch_waits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain_dagster.clusters.azure_ml.controller.WAIT_SECONDS", 0.0)
    with web_hook() as (url, heard):
        monkeypatch.setenv("DTRAIN_NOTIFY", url)
        manager = stage.manager()
        manager.provision_cluster(2, V100)
        spec = stage.spec(manager)
        stage.control("fault", fault="queue", job=f"{spec.job_id}-l1")
        manager.submit_job(spec)
        for looking in (manager, stage.manager(run=None, tends=False), stage.manager(run="run-2")):
            for _ in range(2):
                looking.job_status(spec.job_id)
        manager.cancel_job(spec.job_id)
    [notice] = heard
    assert notice["title"] == f"dtrain: {spec.job_id} waits for nodes"
    assert f"dtrain cancel {spec.job_id}" in notice["message"]


def test_whoever_dies_while_submitting_leaves_a_job_that_the_next_one_submits(stage: Stage) -> None:
    stage.control("fault", fault="error", operation="job.put", count=None)
    manager = stage.manager(patience_seconds=0.5)
    manager.provision_cluster(2, V100)
    spec = stage.spec(manager)
    with pytest.raises(ClusterError, match="cannot be reached"):
        manager.submit_job(spec)
    assert not stage.jobs()
    stage.control("clear")
    follower = stage.manager(run="run-2")
    assert end(follower, spec).state is JobState.SUCCEEDED
    assert list(stage.jobs()) == [f"{spec.job_id}-l1"]


def test_passes_through_throttling_and_faults_of_the_service(stage: Stage) -> None:
    operations = (
        "sizes.list", "usages.list", "compute.list", "compute.get", "compute.put", "code*", "environment*",
        "job.put", "job.get", "history.details", "compute.nodes",
    )  # fmt: skip
    for operation in operations:
        stage.control("fault", fault="error", operation=operation, status=500)
        stage.control("fault", fault="drop", operation=operation)
    for operation in ("compute.put", "job.put", "job.get"):
        stage.control("fault", fault="throttle", operation=operation, retry_after_seconds=1)
    manager, spec = stage.run()
    assert end(manager, spec).state is JobState.SUCCEEDED
    assert len(stage.jobs()) == 1
    quiet = [fault["operation"] for fault in stage.control("faults") if not fault["struck"]]
    assert set(quiet) <= {"compute.nodes", "history.details"}, "whether these are asked depends on the job's pace"


def test_waits_no_longer_than_its_deadline_and_goes_on_with_nodes_that_there_are(stage: Stage) -> None:
    stage.control("fault", fault="capacity", vm_size=V100, nodes=0, count=None)
    manager, spec = stage.run(allocation_patience_seconds=0.5)
    rundir, now = RunDir(spec.run_dir), time.time()
    rundir.write_node(NodePresence(node_id=0, launch=1, started_at=now - 280, ended_at=now - 100))
    write_limit(rundir, 9999.0, stop_at_usd=10.0)
    assert end(manager, spec).state is JobState.SUCCEEDED
    left = 10 - 180 / 3600 * price_of(V100).usd_per_hour("dedicated")
    limit = 180 + left / price_of(A100).usd_per_hour("dedicated") * 3600
    assert rundir.read_json(LIMIT) == {"max_node_seconds": pytest.approx(limit), "stop_at_usd": 10.0}
    launch = rundir.read_json(LAUNCH)
    assert (launch["launch"], launch["sku"], launch["node_count"]) == (2, A100, 2)
    assert "longer than" in launch["history"][0]["reason"]
    assert stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Canceled"


def test_goes_on_with_fewer_nodes_where_there_are_no_others(stage: Stage) -> None:
    stage.control("fault", fault="capacity", nodes=1, count=None)
    manager, spec = stage.run(chain=(), queue_deadline_seconds=2.0)
    assert end(manager, spec).state is JobState.SUCCEEDED
    assert RunDir(spec.run_dir).read_json(LAUNCH)["node_count"] == 1
    assert "rank 0 of 1 in launch 2" in manager.job_logs(spec.job_id)


def test_a_process_that_dies_while_it_ends_a_waiting_job_is_replaced(stage: Stage) -> None:
    """The job is being cancelled; the next process sees to the end of that and buys nothing beside it."""
    stage.control("fault", fault="capacity", nodes=0, count=None)
    manager, spec = stage.run(chain=(), queue_deadline_seconds=1.0)
    record = until(lambda: _stopping(manager.job_status(spec.job_id), spec.run_dir), "the first process to give up")
    assert "longer than" in record["stopping"]
    status = end(stage.manager(run="run-2", chain=()), spec)
    assert status.state is JobState.CANCELLED
    assert status.starved is not None
    with pytest.raises(NoCapacityError, match="waiting for nodes") as refused:
        status.refuse_starved()
    assert refused.value.since == status.starved.since < (status.ended_at or 0.0)
    assert [job["status"] for job in stage.jobs().values()] == ["Canceled"]


def test_lost_nodes_lead_to_the_next_launch(stage: Stage) -> None:
    stage.control("fault", fault="preempt", job=f"{stage.name}-job-l1", node=1, log="in launch 1")
    manager, spec = stage.run(LAST_ONE_DONE)
    assert end(manager, spec).state is JobState.SUCCEEDED
    launch = RunDir(spec.run_dir).read_json(LAUNCH)
    assert (launch["launch"], launch["node_count"]) == (2, 2)
    assert launch["history"][0]["reason"]
    ended = {name: job["status"] for name, job in stage.jobs().items()}
    assert ended == {f"{spec.job_id}-l1": "Failed", f"{spec.job_id}-l2": "Completed"}


def test_a_lost_job_whose_next_name_is_taken_is_refused_and_another_start_takes_the_one_after(stage: Stage) -> None:
    """As where another container of the workspace has a job of the same id."""
    from azure.ai.ml import command
    from azure.ai.ml.entities import Environment

    stage.control("fault", fault="preempt", job=f"{stage.name}-job-l1", node=1, log="in launch 1")
    manager, spec = stage.run(LAST_ONE_DONE)
    theirs = command(
        name=f"{spec.job_id}-l2", command="played /elsewhere []", compute=next(iter(stage.computes())),
        environment=Environment(image="x/y:1"),
    )  # fmt: skip
    manager.service.ml.jobs.create_or_update(theirs)
    with pytest.raises(ClusterError, match=r"has another job called .*-l2 .* or once more under this one"):
        end(manager, spec)
    assert manager.job_status(spec.job_id).state is JobState.FAILED
    again = stage.manager(run="run-2")
    again.submit_job(spec)
    assert end(again, spec).state is JobState.SUCCEEDED
    ended = {name: job["status"] for name, job in stage.jobs().items() if name != theirs.name}
    assert ended == {f"{spec.job_id}-l1": "Failed", f"{spec.job_id}-l3": "Completed"}


def test_only_who_tends_a_job_goes_on_with_it(stage: Stage) -> None:
    stage.control("fault", fault="lose", job=f"{stage.name}-job-l1", node=0, log="in launch 1")
    manager, spec = stage.run(LAST_ONE_DONE, max_resubmissions=1)
    watcher = stage.manager(run=None, tends=False)
    until(lambda: stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Failed", "the nodes to be lost")
    assert watcher.job_status(spec.job_id).state is JobState.QUEUED
    assert watcher.list_jobs()[0].state is JobState.QUEUED
    assert len(stage.jobs()) == 1
    assert end(manager, spec).state is JobState.SUCCEEDED


def test_paid_time_is_what_nodes_wrote_and_ends_when_they_were_last_heard_of(stage: Stage) -> None:
    manager, spec = stage.run(FOREVER)
    rundir, now = RunDir(spec.run_dir), time.time()
    rundir.write_node(NodePresence(node_id=0, launch=1, started_at=now - 280, last_seen_at=now - 9))
    rundir.write_node(NodePresence(node_id=0, launch=1, started_at=now - 5, last_seen_at=now, incarnation=2))
    rundir.write_node(NodePresence(node_id=1, launch=1, started_at=now - 280, last_seen_at=now - 200))
    lost, here, gone = manager.node_usage(spec.job_id)
    assert lost.ended_at == now - 9, "its place is taken"
    assert (here.sku, here.tier) == (V100, "dedicated")
    assert here.ended_at >= now
    assert gone.ended_at == now - 200
    manager.cancel_job(spec.job_id)
    ends = {(node.node_id, node.incarnation): node.ended_at or 0.0 for node in rundir.nodes()}
    assert (ends[0, 1], ends[1, 1]) == (now - 9, now - 200)
    assert now <= ends[0, 2] <= time.time()


def test_orphans_are_found_and_ended(stage: Stage) -> None:
    manager, spec = stage.run(FOREVER)
    until(lambda: stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Running", "the job to run")
    assert manager.find_orphans({"run-1"}) == []
    stage.manager(run="run-2").job_status(spec.job_id)  # another run follows it now
    assert manager.find_orphans({"run-2"}) == []
    (orphan,) = manager.find_orphans({"run-1"})
    assert (orphan.job_id, orphan.dagster_run_id) == (spec.job_id, "run-2")
    assert (orphan.sku, orphan.node_count) == (V100, 2)
    health = manager.monitor_health()
    assert health.healthy
    assert len(health.nodes) == 2
    assert health.running_jobs == (spec.job_id,)
    with pytest.raises(InUseError, match="followed by run run-2"):
        manager.end_orphan(replace(orphan, dagster_run_id="run-1"))
    rundir = RunDir(spec.run_dir)
    rundir.write_json(STATUS, rundir.read_json(STATUS) | {"state": "failed"})  # and its nodes run on
    assert manager.end_orphan(orphan)
    assert stage.jobs()[orphan.name]["status"] == "Canceled"
    (pool,) = until(lambda: [it for it in manager.pools() if not it.work], "idle nodes")
    assert pool.node_count == 2
    assert manager.scale_down(pool)
    assert not stage.computes()
    assert stage.manager().monitor_health().message == "not provisioned"


def _stopping(status: JobStatus, run_dir: str) -> dict[str, Any] | None:
    assert not status.state.is_final
    launch: dict[str, Any] = RunDir(run_dir).read_json(LAUNCH) or {}
    return launch if launch["stopping"] else None

"""The Azure ML cluster against the emulator, with the real clients: what is bought, what is left, what is said."""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.manager import AzureMLClusterManager
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.traces import PROVISIONING
from dtrain_dagster.clusters.base import ClusterError, JobSpec, JobState, JobStatus, NoCapacityError
from tests.azure.azurite import missing
from tests.azure.emulator import Emulator
from trainer.rundir import LAUNCH, NodePresence, RunDir

V100, A100, H100 = "Standard_NC6s_v3", "Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5"
SCRIPT = """
import os, sys, time
from trainer.rundir import NodePresence, RunDir
rundir, launch, rank = RunDir(sys.argv[1]), int(os.environ["DTRAIN_LAUNCH"]), int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} in launch {launch}", flush=True)
def succeed():
    if rank == 0:
        rundir.write_json("result.json", {"status": "succeeded", "launch": launch})
"""
DONE = "succeed()"
LAST_ONE_DONE = """
while launch < 2:
    time.sleep(0.1)
succeed()
"""
FOREVER = "time.sleep(600)"

pytestmark = pytest.mark.slow


class Stage:
    """A cluster of its own in the shared workspace."""

    def __init__(self, emulator: Emulator, folder: Path, name: str) -> None:
        self.emulator, self.folder, self.name = emulator, folder, name

    def manager(self, run: str | None = "run-1", tends: bool = True, **fields: Any) -> AzureMLClusterManager:
        """A manager that nobody else has: what it knows, it has read."""
        environment = self.emulator.environment
        known: dict[str, Any] = {
            "subscription_id": environment["DTRAIN_AZURE_SUBSCRIPTION_ID"],
            "resource_group": environment["DTRAIN_AZURE_RESOURCE_GROUP"],
            "workspace": environment["DTRAIN_AZURE_WORKSPACE"],
            "container": environment["DTRAIN_AZURE_CONTAINER"],
            "cluster_name": self.name,
            "image": "registry.example/dtrain:1",
            "chain": (V100, A100, H100),
            "poll_seconds": 0.2,
            "polling_interval_seconds": 1,
            "start_seconds": 1.0,
        }
        options = AzureMLOptions(**{**known, **fields})
        return AzureMLClusterManager(options, self.folder, dagster_run_id=run, tends=tends)

    def spec(self, manager: AzureMLClusterManager, script: str = DONE, nodes: int = 2, **fields: Any) -> JobSpec:
        job_id = f"{self.name}-job"
        run_dir = f"{manager.jobs_uri}/{job_id}"
        command = (sys.executable, "-c", SCRIPT + script, run_dir)
        return JobSpec(job_id=job_id, run_dir=run_dir, command=command, node_count=nodes, elastic=True, **fields)

    def run(self, script: str = DONE, nodes: int = 2, **fields: Any) -> tuple[AzureMLClusterManager, JobSpec]:
        """Provision and submit."""
        manager = self.manager(**fields)
        manager.provision_cluster(nodes, V100)
        spec = self.spec(manager, script, nodes)
        manager.submit_job(spec)
        return manager, spec

    def control(self, verb: str, **asked: Any) -> Any:
        return self.emulator.control(verb, **asked)

    def jobs(self) -> dict[str, Any]:
        found = self.control("state")["jobs"]
        return {name: job for name, job in found.items() if name.startswith(self.name)}

    def computes(self) -> dict[str, Any]:
        found = self.control("state")["computes"]
        return {name: compute for name, compute in found.items() if name.startswith(f"{self.name}-")}

    def asked(self, operation: str) -> list[dict[str, Any]]:
        return [seen for seen in self.control("requests", operation=operation) if f"/{self.name}-" in seen["path"]]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail(f"waited {seconds:.0f} s in vain for {what}")


def end(manager: AzureMLClusterManager, spec: JobSpec, seconds: float = 90) -> JobStatus:
    def final() -> JobStatus | None:
        status = manager.job_status(spec.job_id)
        return status if status.state.is_final else None

    found: JobStatus = wait_for(final, f"the end of {spec.job_id}", seconds)
    return found


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    if why := missing():
        pytest.skip(why)
    with Emulator(tmp_path_factory.mktemp("emulator")) as found:
        found.control("timing", allocation_retry_seconds=0.3, grace_seconds=1.0)
        yield found


@pytest.fixture
def stage(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[Stage]:
    """After each test: nothing left Failed, and everything that it bought given back."""
    emulator.use(monkeypatch)
    made = Stage(emulator, tmp_path, f"t{zlib.crc32(request.node.name.encode()) % 10**6}")
    yield made
    emulator.control("clear")
    states = {name: compute["state"] for name, compute in made.computes().items()}
    made.manager().cleanup_cluster()
    assert "Failed" not in states.values()
    assert not made.computes()
    assert not [name for name, job in made.jobs().items() if job["status"] not in ("Completed", "Failed", "Canceled")]


class TestProvisioning:
    def test_goes_down_the_chain_and_leaves_nothing_behind(self, stage: Stage) -> None:
        stage.control("fault", fault="refuse", vm_size=V100, how="sync", count=None)
        stage.control("fault", fault="refuse", vm_size=A100, how="async", count=None)
        manager = stage.manager()
        config = manager.provision_cluster(3, V100)
        assert (config.gpu_type, config.tier, config.node_count) == (H100, "dedicated", 3)
        assert [(a.sku, a.code, a.decision) for a in manager.attempts] == [
            (V100, "SkuNotAvailable", "next"),
            (A100, "AllocationFailed", "next"),
            (H100, "Succeeded", "created"),
        ]
        assert list(stage.computes()) == [f"{stage.name}-nc40adsh100v5"]
        body = next(s["body"] for s in stage.asked("compute.put") if s["path"].endswith("h100v5"))
        sent = body["properties"]["properties"]
        assert sent["scaleSettings"] == {
            "minNodeCount": 0, "maxNodeCount": 3, "nodeIdleTimeBeforeScaleDown": "PT10M",
        }  # fmt: skip
        assert (sent["vmPriority"], sent["enableNodePublicIp"]) == ("Dedicated", False)
        assert sent["remoteLoginPortPublicAccess"] == "Disabled"
        assert body["identity"]["type"] == "SystemAssigned"
        lines = manager.audit.lines()
        assert Counter((line["operation"], line["result"], line.get("code")) for line in lines) == {
            ("compute.put", "failed", "SkuNotAvailable"): 1,
            ("compute.put", "failed", "AllocationFailed"): 1,
            ("compute.delete", "done", None): 1,
            ("compute.put", "done", None): 1,
        }
        changes = {s["request_id"]: s["operation"] for s in stage.asked("compute.*") if s["method"] != "GET"}
        assert {line["request_id"]: line["operation"] for line in lines} == changes, "what Azure's support asks for"
        assert all(any(number in a.message for number in changes) for a in manager.attempts if a.decision == "next")

    def test_asks_before_it_buys_and_takes_what_fits(self, stage: Stage) -> None:
        manager = stage.manager(tiers=("low_priority",), subnet="nodes", vnet="net")
        stage.control("quota", family="low_priority", cores=3 * 24)
        try:
            config = manager.provision_cluster(3, H100)  # 40 cores each
            assert [a.code for a in manager.attempts] == ["QuotaTooSmall", "Succeeded"]
            assert (config.gpu_type, config.tier) == (V100, "low_priority")
        finally:
            stage.control("quota", family="low_priority", cores=1000)
        (seen,) = stage.asked("compute.put")
        sent = seen["body"]["properties"]["properties"]
        assert sent["vmPriority"] == "LowPriority"
        assert sent["subnet"]["id"].endswith("/virtualNetworks/net/subnets/nodes")
        stage.manager(tiers=("low_priority",), subnet="nodes", vnet="net").provision_cluster(2, V100)
        assert len(stage.asked("compute.put")) == 1
        bigger = stage.manager(tiers=("low_priority",), subnet="nodes", vnet="net").provision_cluster(4, V100)
        assert bigger.max_nodes == 4
        assert len(stage.computes()) == 1

    def test_no_capacity_says_what_was_tried_and_when_to_ask_again(self, stage: Stage) -> None:
        stage.control("fault", fault="refuse", how="async", count=None)
        with pytest.raises(NoCapacityError, match="low-priority tier") as refused:
            stage.manager().provision_cluster(3, V100)
        assert [attempt["code"] for attempt in refused.value.attempts] == ["AllocationFailed"] * 3
        assert refused.value.retry_at > time.time()
        assert not stage.computes()

    def test_what_no_other_size_changes_ends_the_search(self, stage: Stage) -> None:
        stage.control(
            "fault", fault="error", operation="compute.put", status=403, code="AuthorizationFailed", count=None
        )
        with pytest.raises(ClusterError, match="AuthorizationFailed"):
            stage.manager().provision_cluster(3, V100)
        assert len(stage.asked("compute.put")) == 1

    def test_an_operation_that_hangs_is_given_up_and_cleaned_away(self, stage: Stage) -> None:
        stage.control("fault", fault="stuck", operation="compute.create")
        manager = stage.manager(operation_seconds=2.0)
        assert manager.provision_cluster(3, V100).gpu_type == A100
        assert manager.attempts[0].code == "OperationTimedOut"
        assert len(stage.computes()) == 1

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_lost_answers_cost_nothing(self, stage: Stage, moment: str) -> None:
        for fault in ("drop", "error"):
            stage.control("fault", fault=fault, operation="compute.put", moment=moment)
        assert stage.manager().provision_cluster(3, V100).gpu_type == V100
        assert len(stage.computes()) == 1

    def test_scales_by_saying_all_of_it_again(self, stage: Stage) -> None:
        manager = stage.manager()
        manager.provision_cluster(3, V100)
        assert manager.scale_cluster(5)
        assert not stage.manager().scale_cluster(5)
        sent = stage.asked("compute.put")[-1]["body"]["properties"]["properties"]
        assert sent["scaleSettings"]["maxNodeCount"] == 5
        assert sent["scaleSettings"]["nodeIdleTimeBeforeScaleDown"] == "PT10M"
        assert sent["enableNodePublicIp"] is False


class TestJobs:
    def test_runs_where_the_nodes_were_got_and_says_so(self, stage: Stage) -> None:
        stage.control("fault", fault="refuse", vm_size=V100, how="sync")
        manager, spec = stage.run()
        assert end(manager, spec).state is JobState.SUCCEEDED
        rundir = RunDir(spec.run_dir)
        launch = rundir.read_json(LAUNCH)
        assert (launch["sku"], launch["tier"], launch["launch"]) == (A100, "dedicated", 1)
        assert launch["studio_url"].startswith("https://ml.azure.com/runs/")
        (tried,) = rundir.read_json(PROVISIONING)
        assert [attempt["decision"] for attempt in tried["attempts"]] == ["next", "created"]
        assert "rank 1 of 2 in launch 1" in manager.job_logs(spec.job_id, node_id=1)
        assert "=== node-0.log ===" in stage.manager().job_logs(spec.job_id, tail=1)
        assert [status.job_id for status in stage.manager().list_jobs()] == [spec.job_id]
        with pytest.raises(ClusterError, match="no log of a node 7"):
            manager.job_logs(spec.job_id, node_id=7)
        with pytest.raises(ClusterError, match="no job"):
            manager.job_status("never-heard-of")
        sent = stage.asked("job.put")[0]["body"]["properties"]
        assert sent["environmentVariables"]["DTRAIN_LAUNCH"] == "1"
        assert sent["environmentVariables"]["DTRAIN_PRESENCE"] == "1"
        assert sent["distribution"]["distributionType"] == "PyTorch"
        assert sent["tags"]["dagster_run_id"] == "run-1"

    def test_is_bought_once_whoever_asks_and_whatever_answers_are_lost(self, stage: Stage) -> None:
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

    def test_one_that_was_cancelled_or_failed_is_submitted_again_as_its_next_launch(self, stage: Stage) -> None:
        manager, spec = stage.run("sys.exit(1)")
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

    def test_whoever_dies_while_submitting_leaves_a_job_that_the_next_one_submits(self, stage: Stage) -> None:
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

    def test_passes_through_throttling_and_faults_of_the_service(self, stage: Stage) -> None:
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

    def test_a_service_that_is_away_is_a_message_and_no_error(self, stage: Stage) -> None:
        manager, spec = stage.run(FOREVER, look_patience_seconds=0.3)
        wait_for(lambda: manager.job_status(spec.job_id).state is JobState.RUNNING, "the job to run")
        stage.control("fault", fault="error", operation="job.get", count=None)
        away = wait_for(lambda: _if("cannot be reached since", manager.job_status(spec.job_id)), "the message")
        assert away.state is JobState.RUNNING
        stage.control("clear")
        wait_for(lambda: not manager.job_status(spec.job_id).message, "the service to be back")

    def test_waits_no_longer_than_its_deadline_and_goes_on_with_nodes_that_there_are(self, stage: Stage) -> None:
        stage.control("fault", fault="capacity", vm_size=V100, nodes=0, count=None)
        manager, spec = stage.run(allocation_patience_seconds=0.5)
        assert end(manager, spec).state is JobState.SUCCEEDED
        launch = RunDir(spec.run_dir).read_json(LAUNCH)
        assert (launch["launch"], launch["sku"], launch["node_count"]) == (2, A100, 2)
        assert "longer than" in launch["history"][0]["reason"]
        assert stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Canceled"

    def test_goes_on_with_fewer_nodes_where_there_are_no_others(self, stage: Stage) -> None:
        stage.control("fault", fault="capacity", nodes=1, count=None)
        manager, spec = stage.run(chain=(), queue_deadline_seconds=2.0)
        assert end(manager, spec).state is JobState.SUCCEEDED
        assert RunDir(spec.run_dir).read_json(LAUNCH)["node_count"] == 1
        assert "rank 0 of 1 in launch 2" in manager.job_logs(spec.job_id)

    def test_fails_in_words_where_there_is_not_one_node(self, stage: Stage) -> None:
        stage.control("fault", fault="capacity", nodes=0, count=None)
        manager, spec = stage.run(chain=(), queue_deadline_seconds=1.0)
        status = end(manager, spec)
        assert status.state is JobState.FAILED
        assert "waits for nodes" in status.message
        assert "no capacity" in status.message
        assert len(stage.jobs()) == 1

    @pytest.mark.parametrize("fault", ["lose", "preempt"])
    def test_lost_nodes_lead_to_the_next_launch(self, stage: Stage, fault: str) -> None:
        stage.control("fault", fault=fault, job=f"{stage.name}-job-l1", node=1, log="in launch 1")
        manager, spec = stage.run(LAST_ONE_DONE)
        assert end(manager, spec).state is JobState.SUCCEEDED
        launch = RunDir(spec.run_dir).read_json(LAUNCH)
        assert (launch["launch"], launch["node_count"]) == (2, 2)
        assert launch["history"][0]["reason"]
        assert {name: job["status"] for name, job in stage.jobs().items()} == {
            f"{spec.job_id}-l1": "Failed", f"{spec.job_id}-l2": "Completed",
        }  # fmt: skip

    def test_only_who_tends_a_job_goes_on_with_it(self, stage: Stage) -> None:
        stage.control("fault", fault="lose", job=f"{stage.name}-job-l1", node=0, log="in launch 1")
        manager, spec = stage.run(LAST_ONE_DONE, max_resubmissions=1)
        watcher = stage.manager(run=None, tends=False)
        wait_for(lambda: stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Failed", "the nodes to be lost")
        assert watcher.job_status(spec.job_id).state is JobState.QUEUED
        assert watcher.list_jobs()[0].state is JobState.QUEUED
        assert len(stage.jobs()) == 1
        assert end(manager, spec).state is JobState.SUCCEEDED

    def test_is_not_submitted_again_for_ever(self, stage: Stage) -> None:
        stage.control("fault", fault="lose", log="in launch", count=None)
        manager, spec = stage.run(FOREVER, max_resubmissions=1)
        status = end(manager, spec)
        assert status.state is JobState.FAILED
        assert "as often as it may be" in status.message
        assert "materialize trained_checkpoint again" in status.message
        assert len(stage.jobs()) == 2

    def test_a_lost_job_that_is_cancelled_is_not_gone_on_with(self, stage: Stage) -> None:
        stage.control("fault", fault="lose", job=f"{stage.name}-job-l1", node=0, log="in launch 1")
        manager, spec = stage.run(LAST_ONE_DONE)
        wait_for(lambda: stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Failed", "the nodes to be lost")
        stage.manager().cancel_job(spec.job_id)
        assert manager.job_status(spec.job_id).state is JobState.CANCELLED
        assert len(stage.jobs()) == 1

    def test_a_job_that_does_not_respond_is_ended_and_gone_on_with(self, stage: Stage) -> None:
        stage.control("fault", fault="status", job=f"{stage.name}-job-l1", status="NotResponding")
        manager, spec = stage.run(LAST_ONE_DONE, silence_seconds=1.0)
        assert end(manager, spec).state is JobState.SUCCEEDED
        assert "NotResponding" in RunDir(spec.run_dir).read_json(LAUNCH)["history"][0]["reason"]
        assert stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Canceled"

    def test_a_name_that_is_taken_by_another_job_is_not_taken_for_ours(self, stage: Stage) -> None:
        manager, spec = stage.run()
        assert end(manager, spec).state is JobState.SUCCEEDED
        RunDir(spec.run_dir).storage.delete("")  # somebody has cleared the storage, and the workspace remembers
        manager = stage.manager()
        manager.submit_job(spec)
        assert end(manager, spec).state is JobState.SUCCEEDED
        assert RunDir(spec.run_dir).read_json(LAUNCH)["launch"] == 2

    def test_paid_time_is_what_nodes_wrote_and_ends_when_they_were_last_heard_of(self, stage: Stage) -> None:
        manager, spec = stage.run(FOREVER)
        rundir, now = RunDir(spec.run_dir), time.time()
        rundir.write_node(NodePresence(node_id=0, launch=1, started_at=now - 500, last_seen_at=now))
        rundir.write_node(NodePresence(node_id=1, launch=1, started_at=now - 500, last_seen_at=now - 300))
        here, gone = manager.node_usage(spec.job_id)
        assert (here.sku, here.tier) == (V100, "dedicated")
        assert here.ended_at >= now
        assert gone.ended_at == now - 300
        manager.cancel_job(spec.job_id)
        ends = {node.node_id: node.ended_at for node in rundir.nodes()}
        assert ends[1] == now - 300
        assert now <= ends[0] <= time.time()


class TestCare:
    def test_orphans_are_found_and_ended(self, stage: Stage) -> None:
        manager, spec = stage.run(FOREVER)
        wait_for(lambda: stage.jobs()[f"{spec.job_id}-l1"]["status"] == "Running", "the job to run")
        assert manager.find_orphans({"run-1"}) == []
        stage.manager(run="run-2").job_status(spec.job_id)  # another run follows it now
        assert manager.find_orphans({"run-2"}) == []
        (orphan,) = manager.find_orphans({"run-1"})
        assert (orphan.kind, orphan.job_id, orphan.dagster_run_id) == ("job", spec.job_id, "run-2")
        assert (orphan.sku, orphan.node_count) == (V100, 2)
        health = manager.monitor_health()
        assert health.healthy
        assert len(health.nodes) == 2
        assert health.running_jobs == (spec.job_id,)
        manager.end_orphan(orphan)
        assert stage.jobs()[orphan.name]["status"] == "Canceled"
        (left,) = manager.find_orphans({"run-1"})
        assert (left.kind, left.node_count) == ("compute", 2)
        manager.end_orphan(left)
        assert not stage.computes()
        assert stage.manager().monitor_health().message == "not provisioned"

    def test_nothing_secret_is_written_anywhere(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DTRAIN_PLANTED_SECRET", "PLANTED")
        monkeypatch.setenv("AZURE_STORAGE_KEY", "PLANTED")
        manager, spec = stage.run()
        end(manager, spec)
        storage = RunDir(spec.run_dir).storage
        names = [name for name in storage.list() if "." in name] + [f"logs/{name}" for name in storage.list("logs")]
        written = [storage.read(name).decode() for name in names]
        written += [path.read_text() for path in stage.folder.rglob("*.jsonl")]
        written.append(json.dumps([seen["body"] for seen in stage.control("requests", operation="job.put")]))
        assert len(written) > 4
        header = stage.emulator.environment["IDENTITY_HEADER"]
        assert not [text for text in written if "PLANTED" in text or "sig=" in text or header in text]


def _if(word: str, status: JobStatus) -> JobStatus | None:
    return status if word in status.message else None

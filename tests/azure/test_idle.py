"""Nodes that Azure does not give back by itself are given back, and never under anybody's work (R1.2)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.clusters import job_marks
from dtrain_dagster.clusters.azure_ml.client import ServiceUnreachable
from dtrain_dagster.clusters.azure_ml.provision import CLUSTER_TAG, TAG
from dtrain_dagster.clusters.base import ClusterError, InUseError, JobState
from dtrain_dagster.clusters.job_marks import CLOSING_SECONDS
from dtrain_dagster.settings.environment import load_settings
from harness.waiting import until
from tests.azure.stage import FOREVER, V100, Stage
from tests.ticks import Daemon

pytestmark = pytest.mark.slow


@pytest.fixture
def daemon(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    for name, value in {
        "DTRAIN_HOME": str(tmp_path / "home"),
        "DTRAIN_CLUSTER": "azure_ml",
        "DTRAIN_CLUSTER_NAME": stage.name,
        "DTRAIN_STORAGE": (storage := stage.emulator.environment["DTRAIN_STORAGE"]),
        "DTRAIN_AZURE_IMAGE": "registry.example/dtrain:1",
    }.items():
        monkeypatch.setenv(name, value)
    stage.storage = storage
    with dg.DagsterInstance.ephemeral() as instance:
        yield Daemon(load_settings(), instance, monkeypatch)


def keep_nodes(stage: Stage, size: str = V100, count: int = 2) -> str:
    """Nodes that somebody keeps whatever there is to do, under this cluster's name; the compute's name."""
    from azure.ai.ml.entities import AmlCompute

    name, tags = f"{stage.name}-kept", {TAG: "1", CLUSTER_TAG: stage.name}
    kept = AmlCompute(name=name, size=size, min_instances=count, max_instances=3, tags=tags)
    stage.manager().service.ml.compute.begin_create_or_update(kept).wait()
    until(lambda: states(stage, name) == ["idle"] * count, "idle nodes")
    return name


def states(stage: Stage, name: str) -> list[str]:
    return [node["state"] for node in stage.computes()[name]["nodes"]]


def test_nodes_that_a_minimum_keeps_are_let_go(stage: Stage, daemon: Daemon) -> None:
    name = keep_nodes(stage)
    [first] = daemon.ticks(4, 150.0)
    assert (first["nodes"], first["states"], first["passed"]) == (2, f"{name}: 2 idle", True)
    stage.control("fault", fault="fail", operation="compute.delete")
    daemon.ticks(2, 150.0)
    assert "it keeps 2 nodes even when there is no work" in daemon.told[0]
    assert "$6.12 per hour, $1.02 so far (list price, not the bill)" in daemon.told[0]
    assert daemon.told[-1].endswith("scaled down"), "it is tried again where the service failed"
    assert not stage.computes()


def test_a_cluster_is_never_scaled_down_under_work_of_anybody(stage: Stage, daemon: Daemon) -> None:
    from azure.ai.ml import command
    from azure.ai.ml.entities import Environment

    manager, spec = stage.run(FOREVER)
    until(lambda: manager.job_status(spec.job_id).state is JobState.RUNNING, "the job to run")
    [compute] = stage.computes()
    recorded = daemon.ticks(6, 180.0)
    assert {item["running_jobs"] for item in recorded} == {f"{spec.job_id}, {spec.job_id}-l1"}
    [mark] = manager._active.marks() or []
    manager._active.leave(mark)
    assert not manager.active_jobs()
    pool = manager.pools()[0]
    assert pool.work, "the nodes tell, too"
    with pytest.raises(InUseError, match="at work"):
        manager.scale_down(pool)
    manager._active.enter(mark)
    manager.cancel_job(spec.job_id)
    assert manager.active_jobs() == []
    assert manager._active.marks() == []

    theirs = command(
        name=f"{stage.name}-theirs", command=f"{sys.executable} -c pass", compute=compute, instance_count=3,
        environment=Environment(image="x/y:1"),
    )  # fmt: skip
    stage.control("fault", fault="queue", job=f"{stage.name}-theirs")
    manager.service.ml.jobs.create_or_update(theirs)
    manager.service.ml.jobs.archive(f"{stage.name}-theirs")
    until(lambda: "idle" in states(stage, compute), "idle nodes")
    assert any("theirs" in item["idle"] for item in daemon.ticks(6, 180.0) if "idle" in item)
    assert compute in stage.computes()
    manager.service.ml.jobs.begin_cancel(f"{stage.name}-theirs").wait()


def test_a_compute_stays_where_it_is_used_again_or_its_end_takes_too_long(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from azure.ai.ml.entities import AmlCompute

    manager = stage.manager(look_patience_seconds=1.0)
    manager.provision_cluster(2, V100)
    [compute] = stage.computes()
    tags = {TAG: "1", CLUSTER_TAG: stage.name}
    kept = AmlCompute(name=compute, size=V100, min_instances=2, max_instances=2, tags=tags, enable_node_public_ip=False)
    manager.service.ml.compute.begin_create_or_update(kept).wait()
    until(lambda: states(stage, compute) == ["idle"] * 2, "idle nodes")
    [pool] = manager.pools()
    manager.provision_cluster(2, V100)
    with pytest.raises(InUseError, match="just used"):
        manager.scale_down(pool)

    [pool] = manager.pools()
    stage.control("fault", fault="error", operation="compute.get", status=503, count=None)
    with pytest.raises(ServiceUnreachable, match="tried for 1 s"):
        manager.scale_down(pool)
    stage.control("clear")
    settled = manager.provisioner.settled

    def be_slow(*args: Any) -> Any:
        late = time.time() + CLOSING_SECONDS - 1
        monkeypatch.setattr(job_marks, "time", SimpleNamespace(time=lambda: late))
        return settled(*args)

    with monkeypatch.context() as patch:
        patch.setattr(manager.provisioner, "settled", be_slow)
        with pytest.raises(InUseError, match="takes too long"):
            manager.scale_down(pool)
    monkeypatch.setattr(job_marks, "time", time)
    assert compute in stage.computes()
    assert manager.scale_down(pool)
    assert compute not in stage.computes()
    with pytest.raises(ClusterError, match="not provisioned"):
        manager.scale_cluster(1)

"""The sensors, evaluated as the daemon does, over a real local cluster."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.clusters.base import OWNER, GPUClusterManager, JobSpec, Orphan
from dtrain_dagster.clusters.local import LocalClusterManager
from dtrain_dagster.jobs import PLAN
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.cost_overrun import build_cost_overrun_sensor
from dtrain_dagster.sensors.idle_cluster import build_idle_cluster_sensor
from dtrain_dagster.sensors.orphans import build_orphan_sensor, why_spared
from dtrain_dagster.settings import Settings
from trainer.rundir import RunDir


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, nodes=2)


@pytest.fixture
def manager(settings: Settings) -> Iterator[GPUClusterManager]:
    cluster = build_resources(settings)["cluster"].manager()
    yield cluster
    cluster.cleanup_cluster()


def evaluate(sensor: dg.SensorDefinition, settings: Settings, cursor: str | None = None) -> Any:
    resources = {key: value for key, value in build_resources(settings).items() if key in sensor.required_resource_keys}
    with dg.build_sensor_context(cursor=cursor, resources=resources) as context:
        return sensor.evaluate_tick(context)


def run_sleeper(manager: GPUClusterManager, settings: Settings, seconds: float) -> str:
    job_id = "train-00000000-11111111"
    command = (sys.executable, "-c", f"import time; time.sleep({seconds})")
    run_dir = f"{settings.jobs_uri}/{job_id}"
    manager.submit_job(JobSpec(job_id=job_id, run_dir=run_dir, command=command, node_count=2))
    return job_id


def test_an_idle_cluster_is_given_back(manager: GPUClusterManager, settings: Settings):
    sensor = build_idle_cluster_sensor(settings)
    assert "no nodes" in evaluate(sensor, settings).skip_message

    manager.provision_cluster(2, "Standard_NC6s_v3")
    first = evaluate(sensor, settings)
    [observed, check] = first.asset_events
    assert check.passed
    assert observed.metadata["nodes"].value == 2

    patient = evaluate(sensor, settings, cursor=str(time.time() - 9 * 60))
    assert patient.asset_events[1].passed
    late = evaluate(sensor, settings, cursor=str(time.time() - 11 * 60))
    assert not late.asset_events[1].passed
    assert not manager.monitor_health().nodes
    assert "no nodes" in evaluate(sensor, settings, cursor=late.cursor).skip_message


def test_a_cluster_at_work_is_not_idle(manager: GPUClusterManager, settings: Settings):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    job_id = run_sleeper(manager, settings, 30)
    result = evaluate(build_idle_cluster_sensor(settings), settings, cursor=str(time.time() - 3600))
    assert result.asset_events[1].passed
    assert result.asset_events[0].metadata["running_jobs"].value == job_id
    assert manager.monitor_health().nodes


def test_a_job_above_its_estimate_is_told_once(manager: GPUClusterManager, settings: Settings):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    job_id = run_sleeper(manager, settings, 30)
    rundir = RunDir(f"{settings.jobs_uri}/{job_id}")
    sensor = build_cost_overrun_sensor(settings)

    def plan(usd: float) -> None:
        rundir.write_json(PLAN, {"tier": "dedicated", "node_count": 2, "estimate": {"usd": {"expected": usd}}})

    plan(1000.0)
    assert "none newly above" in evaluate(sensor, settings).skip_message
    plan(1e-9)
    told = evaluate(sensor, settings)
    [check] = told.asset_events
    assert not check.passed
    assert check.asset_key == dg.AssetKey("trained_checkpoint")
    assert check.metadata["job_id"].value == job_id
    assert "fewer nodes" in check.metadata["advice"].value
    again = evaluate(sensor, settings, cursor=told.cursor)
    assert not again.asset_events


def test_a_job_without_a_live_run_is_told_once_or_cancelled(
    manager: GPUClusterManager, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    job_id = run_sleeper(manager, settings, 60)
    owner = RunDir(f"{settings.jobs_uri}/{job_id}")
    with dg.DagsterInstance.ephemeral() as instance:
        notifies = build_orphan_sensor(settings)
        cancels = build_orphan_sensor(settings.model_copy(update={"orphan_policy": "cancel"}))

        def look(sensor: dg.SensorDefinition, cursor: str | None = None) -> Any:
            resources = build_resources(settings)
            with dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources) as context:
                return sensor.evaluate_tick(context)

        def an_hour_later(cursor: str) -> str:
            seen = json.loads(cursor)
            for item in seen["orphans"].values():
                item["since"] -= 3600
            return json.dumps(seen)

        assert "0 without a live run" in look(notifies).skip_message, "a job of the command line is a person's own"
        live = instance.add_run(dg.DagsterRun(job_name="graph", status=dg.DagsterRunStatus.STARTED))
        owner.write_json(OWNER, {"dagster_run_id": live.run_id})
        assert "0 without a live run" in look(cancels).skip_message

        owner.write_json(OWNER, {"dagster_run_id": "of-another-dagster"})
        told = look(cancels, an_hour_later(look(cancels).cursor))
        assert "another" in told.asset_events[0].metadata["run"].value
        assert not manager.job_status(job_id).state.is_final, "who knows whose it is"

        ended = instance.add_run(dg.DagsterRun(job_name="graph", status=dg.DagsterRunStatus.FAILURE))
        owner.write_json(OWNER, {"dagster_run_id": ended.run_id})
        first = look(cancels, told.cursor)
        [check] = first.asset_events
        assert check.passed, "the clock starts anew: its run may be about to be tried again"
        late = an_hour_later(first.cursor)

        def find_and_be_late(self: LocalClusterManager, live_runs: Any) -> list[Orphan]:
            found = find(self, live_runs)
            owner.write_json(OWNER, {"dagster_run_id": live.run_id})
            return found

        find = LocalClusterManager.find_orphans
        with monkeypatch.context() as patch:
            patch.setattr(LocalClusterManager, "find_orphans", find_and_be_late)
            taken_over = look(cancels, late)
        assert not taken_over.asset_events
        assert json.loads(taken_over.cursor) == {"orphans": {}}
        assert not manager.job_status(job_id).state.is_final, "a run has taken it over while it was looked at"

        owner.write_json(OWNER, {"dagster_run_id": ended.run_id})
        told = look(notifies, late)
        [check] = told.asset_events
        assert not check.passed
        assert (check.metadata["job_id"].value, check.metadata["node_count"].value) == (job_id, 2)
        assert "stand-in" in check.metadata["cost_per_hour"].value
        assert not look(notifies, told.cursor).asset_events, "once is enough"
        assert not manager.job_status(job_id).state.is_final

        ended_now = look(cancels, late)
        assert ended_now.asset_events[0].metadata["what_was_done"].value == "ended"
        assert manager.job_status(job_id).state.is_final
        [check] = look(cancels, ended_now.cursor).asset_events
        assert check.passed


def test_what_may_be_somebody_elses_is_never_ended():
    compute = Orphan(kind="compute", name="c", reason="3 are at work")
    assert not why_spared(compute, is_own=True)
    assert "Dagster" in why_spared(compute, is_own=False)
    assert "work" in why_spared(replace(compute, is_busy=True), is_own=True)

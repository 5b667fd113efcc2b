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
from dtrain_dagster.definitions import RETRAINING
from dtrain_dagster.jobs import PLAN
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.cost_overrun import COST_TOLD, build_cost_overrun_sensor
from dtrain_dagster.sensors.idle_cluster import build_idle_cluster_sensor
from dtrain_dagster.sensors.new_data import build_new_data_sensor
from dtrain_dagster.sensors.orphans import build_orphan_sensor, why_spared
from dtrain_dagster.settings import Settings
from trainer.rundir import RunDir, event


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


def run_sleeper(
    manager: GPUClusterManager, settings: Settings, seconds: float, job_id: str = "train-00000000-11111111"
) -> str:
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


def steps_of(rundir: RunDir, last: int, seconds: float) -> None:
    """As rank 0 reports them, one file for each report."""
    for number, step in enumerate(range(10, last + 1, 10), start=1):
        fields = {"step": step, "epoch": 0, "loss": 1.0, "step_seconds": seconds}
        rundir.append_events(1, 0, number, [event("step", 0, 1, **fields)])


def test_a_job_above_its_estimate_is_told_once_for_each_threshold(
    manager: GPUClusterManager, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Over ticks, lost cursors and a restart; whatever a neighbour or a notifier does."""
    manager.provision_cluster(2, "Standard_NC6s_v3")
    damaged, job_id = run_sleeper(manager, settings, 60, "train-0-damaged"), run_sleeper(manager, settings, 60)
    RunDir(f"{settings.jobs_uri}/{damaged}").storage.write(PLAN, b'{"tier": ')
    rundir = RunDir(f"{settings.jobs_uri}/{job_id}")
    monkeypatch.setattr("apprise.Apprise.notify", lambda *_, **__: 1 / 0)
    settings = settings.model_copy(update={"notify": "json://127.0.0.1:1"})
    sensor = build_cost_overrun_sensor(settings)
    key = dg.AssetCheckKey(dg.AssetKey("trained_checkpoint"), "cost_within_estimate")

    def plan(usd: float) -> None:
        estimate = {"usd": {"expected": usd}}
        rundir.write_json(PLAN, {"tier": "dedicated", "work": {"steps": 1000}, "estimate": estimate})

    def look(instance: dg.DagsterInstance, cursor: str | None) -> tuple[list[str], str]:
        """The checks recorded so far, oldest first, as kind and threshold; the cursor after this tick."""
        resources = build_resources(settings)
        with dg.build_sensor_context(instance=instance, cursor=cursor, resources=resources) as context:
            after = sensor.evaluate_tick(context).cursor
        history = instance.event_log_storage.get_asset_check_execution_history(key, limit=99)
        found: list[Any] = [record.event.dagster_event.event_specific_data for record in reversed(history)]  # type: ignore[union-attr]
        assert not any(item.passed for item in found)
        assert {item.metadata["job_id"].value for item in found} <= {job_id}
        figures = [(item.metadata["kind"].value, item.metadata["threshold_percent"].value) for item in found]
        return [f"{kind} {level:.0f}" for kind, level in figures], after

    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        plan(1000.0)
        assert look(instance, None)[0] == [], "within its estimate"
        steps_of(rundir, 100, seconds=10.0)  # 9000 s more on two nodes at 3.06 dollars an hour: about 15.3
        plan(9.0)
        checks, first = look(instance, None)
        assert checks == [], "one look at a projection is none"
        checks, second = look(instance, first)
        assert checks == ["projected 50"]
        assert look(instance, second)[0] == look(instance, "nonsense")[0] == checks, "told already"

    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:  # the daemon is started again
        assert look(instance, first)[0] == look(instance, None)[0] == checks
        plan(1e-9)
        checks, third = look(instance, second)
        assert checks == ["projected 50", "actual 100"]
        assert look(instance, third)[0] == look(instance, None)[0] == checks
    sentences = [item["sentence"] for item in (rundir.read_json(COST_TOLD) or {}).values()]
    assert any("will cost" in sentence for sentence in sentences)
    assert any("has cost" in sentence for sentence in sentences)


def test_a_changed_price_file_retrains(tmp_path: Path):
    prices = tmp_path / "prices.csv"
    prices.write_text("date,A\n2020-01-02,1\n")
    settings = Settings(home=tmp_path, prices=str(prices))
    sensor = build_new_data_sensor(settings, RETRAINING)
    first = evaluate(sensor, settings)
    assert not first.run_requests
    unchanged = evaluate(sensor, settings, cursor=first.cursor)
    assert "has not changed" in unchanged.skip_message
    prices.write_text("date,A\n2020-01-02,1\n2020-01-03,2\n")
    changed = evaluate(sensor, settings, cursor=first.cursor)
    [request] = changed.run_requests
    assert request.run_key
    assert changed.cursor != first.cursor

    bundled = Settings(home=tmp_path)
    assert "does not change" in evaluate(build_new_data_sensor(bundled, RETRAINING), bundled).skip_message


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

"""The sensors, evaluated as the daemon does, over a real local cluster."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.clusters.base import OWNER, ClusterError, GPUClusterManager, JobSpec, NodePool, Orphan
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.monitoring.strategies import Change
from dtrain_dagster.planning.projection import Overrun, Projection
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.cost_overrun import _READ, COST_TOLD, _check, build_cost_overrun_sensor, judge_cost
from dtrain_dagster.sensors.orphans import build_orphan_sensor
from dtrain_dagster.settings.environment import Settings
from tests.ticks import Daemon
from tests.webhook import web_hook
from trainer.rundir import EVENTS, RunDir, event, event_file
from trainer.storage.base import Storage


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


@pytest.fixture
def daemon(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Daemon(settings, instance, monkeypatch)


def test_an_idle_cluster_is_given_back_and_told_once(manager: GPUClusterManager, daemon: Daemon):
    assert daemon.ticks(2) == []
    manager.provision_cluster(2, "Standard_NC6s_v3")
    [first] = daemon.ticks(10)
    assert (first["nodes"], first["nodes_idle"], first["passed"], first["states"]) == (2, 2, True, "local: 2 idle")
    assert manager.pools()
    late = daemon.tick()
    assert late is not None
    assert (late["passed"], late["scaled_down"], late["idle_seconds"]) == (False, True, 600.0)
    assert late["wasted_usd"] == pytest.approx(2 * 3.06 / 6)
    assert not manager.pools()
    assert daemon.told == [
        "local: 2 x Standard_NC6s_v3 without work for 10 min 00 s, $6.12 per hour, $1.02 so far (stand-in price, "
        "nothing was billed); scaled down"
    ]
    [after] = daemon.ticks(6, 900.0)
    assert (after["nodes"], after["passed"]) == (0, True)
    assert len(daemon.told) == 1


def test_of_several_pools_each_gets_its_turn(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    """One is tried at a tick; the newer one, whose idle time is shorter, fails each time."""
    tried, pools = list[str](), [NodePool(name="old", sku="Standard_NC6s_v3", states={"idle": 1}, node_count=1)]

    def scale_down(_: Any, pool: NodePool) -> bool:
        tried.append(pool.name)
        raise ClusterError("not now")

    monkeypatch.setattr(LocalClusterManager, "pools", lambda _: pools)
    monkeypatch.setattr(LocalClusterManager, "scale_down", scale_down)
    daemon.ticks(20, 300.0)
    pools.append(replace(pools[0], name="new"))
    tried.clear()
    daemon.ticks(20, 300.0)
    assert abs(tried.count("old") - tried.count("new")) < 5, tried


def test_only_what_changes_is_recorded(manager: GPUClusterManager, settings: Settings, daemon: Daemon):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    daemon.settings = settings.model_copy(update={"idle_minutes": 1000.0})
    assert len(daemon.ticks(7, 300.0)) == 1
    job_id = run_sleeper(manager, settings, 60)
    [at_work] = daemon.ticks(5, 1800.0)
    assert (at_work["running_jobs"], at_work["idle_usd_per_hour"]) == (job_id, 0)


def test_a_cluster_at_work_is_not_idle_even_if_its_mark_is_lost(
    manager: LocalClusterManager, settings: Settings, daemon: Daemon
):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    job_id = run_sleeper(manager, settings, 60)
    daemon.ticks(2, 450.0)
    assert manager.pools()[0].work == (job_id,)
    [mark] = manager.active.marks() or []
    manager.active.leave(mark)
    assert not manager.pools()[0].work
    recorded = daemon.ticks(3, 305.0)
    assert any("it is about to be used" in item.get("idle", "") for item in recorded)
    assert manager.pools()[0].work == (job_id,), "it has its mark again"
    assert not daemon.told
    manager.cancel_job(job_id)
    assert daemon.ticks(2, 290.0)[-1]["passed"]
    assert manager.pools(), "ten minutes after the job, not after the last mistake"


def test_a_job_submitted_during_the_decision_keeps_its_cluster(
    manager: LocalClusterManager, settings: Settings, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    daemon.ticks(2, 300.0)
    scale_down = LocalClusterManager.scale_down

    def be_late(self: LocalClusterManager, pool: NodePool) -> bool:
        manager.use.begin("somebody's next job")
        return scale_down(self, pool)

    with monkeypatch.context() as patch:
        patch.setattr(LocalClusterManager, "scale_down", be_late)
        assert daemon.ticks(2, 300.0)
    assert manager.pools()
    assert not daemon.told
    delete = Storage.delete
    waits: list[float] = []

    def submit_late(storage: Storage, name: str) -> None:
        """Just when nothing can hold the scale-down any more, a job comes; in a thread, for it has to wait."""
        if name == "cluster.json":
            thread.start()
            thread.join(1.0)
            waits.append(thread.is_alive())
        delete(storage, name)

    thread = threading.Thread(target=lambda: manager.use.begin("the next job"))
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", submit_late)
        daemon.ticks(4, 300.0)
    thread.join()
    assert waits == [True]


def test_a_run_that_is_about_to_submit_keeps_the_cluster_while_it_shows_life(
    manager: GPUClusterManager, daemon: Daemon
):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    asked = frozenset({dg.AssetKey("trained_checkpoint")})
    run = daemon.instance.add_run(
        dg.DagsterRun(job_name="graph", status=dg.DagsterRunStatus.STARTED, asset_selection=asked)
    )
    held = daemon.ticks(4, 240.0)[-1]
    assert run.run_id in held["idle"]
    assert not held["scaled_down"]
    assert any(item["scaled_down"] for item in daemon.ticks(6, 300.0)), "a run that died without a word keeps nothing"


def test_runs_that_do_not_use_the_cluster_do_not_keep_it(manager: GPUClusterManager, daemon: Daemon):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    for status, asset in (
        (dg.DagsterRunStatus.STARTED, None),
        (dg.DagsterRunStatus.STARTED, "somebody_elses_table"),
        (dg.DagsterRunStatus.STARTED, "stock_prices"),
        (dg.DagsterRunStatus.NOT_STARTED, "trained_checkpoint"),
    ):
        asked = None if asset is None else frozenset({dg.AssetKey(asset)})
        daemon.instance.add_run(dg.DagsterRun(job_name="job", status=status, asset_selection=asked))
    assert any(item["scaled_down"] for item in daemon.ticks(4, 240.0))


def test_a_scale_down_that_fails_is_tried_again_told_once_and_told_when_it_is_done(
    manager: LocalClusterManager, daemon: Daemon
):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    daemon.ticks(2, 300.0)
    obstacle = manager.state.local_path("closing.json")
    obstacle.mkdir()
    failed = daemon.ticks(4, 200.0)
    assert "could not be scaled down, and is tried again" in failed[0]["idle"]
    assert len(daemon.told) == 1
    obstacle.rmdir()
    assert any(item["scaled_down"] for item in daemon.ticks(3, 300.0))
    assert len(daemon.told) == 2
    assert daemon.told[1].endswith("scaled down")


def steps_of(rundir: RunDir, last: int, seconds: float) -> None:
    """As rank 0 reports them, one file for each report."""
    for number, step in enumerate(range(10, last + 1, 10), start=1):
        fields = {"step": step, "epoch": 0, "loss": 1.0, "step_seconds": seconds}
        rundir.append_events(1, 0, number, [event("step", 0, 1, **fields)])


@pytest.mark.slow
def test_a_job_above_its_estimate_is_told_once_for_each_threshold(
    manager: GPUClusterManager, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Over ticks, lost cursors and a restart; whatever a neighbour or a notifier does."""
    manager.provision_cluster(2, "Standard_NC6s_v3")
    damaged, job_id = run_sleeper(manager, settings, 600, "train-0-damaged"), run_sleeper(manager, settings, 600)
    RunDir(f"{settings.jobs_uri}/{damaged}").storage.write(PLAN, b'{"tier": ')
    rundir = RunDir(f"{settings.jobs_uri}/{job_id}")
    monkeypatch.setattr("apprise.Apprise.notify", lambda *_, **__: 1 / 0)
    settings = settings.model_copy(update={"notify": "json://127.0.0.1:1"})
    sensor = build_cost_overrun_sensor()
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
        assert look(instance, second)[0] == look(instance, "{}")[0] == checks, "told already"

    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:  # the daemon is started again
        assert look(instance, first)[0] == look(instance, None)[0] == checks
        plan(1e-9)
        checks, third = look(instance, second)
        assert checks == ["projected 50", "actual 100"]
        assert look(instance, third)[0] == look(instance, None)[0] == checks
    sentences = [item["sentence"] for item in (rundir.read_json(COST_TOLD) or {}).values()]
    assert any("will cost" in sentence for sentence in sentences)
    assert any("has cost" in sentence for sentence in sentences)


BEGAN, TRAINING, EVALUATION = 1_790_000_000.0, 5940.0, 600.0


def two_hours(rundir: RunDir, seconds: float, remote: bool) -> Iterator[float]:
    """What rank 0 writes, by a clock of its own: after each minute, when that is. A file of samples each 2 s, or 5 s on
    remote storage; each ten steps a report. It starts for a minute and evaluates after half of the steps, from where
    another world goes on, and after all."""
    every, step, at, number, generation = 5.0 if remote else 2.0, 0, 60.0, 0, 1
    folder = rundir.storage.local_path(EVENTS)
    folder.mkdir(parents=True)
    for minute in range(1, 121):
        for place in range(int(60 * (minute - 1) / every), int(60 * minute / every)):
            now = every * place
            lines = [event("node", 0, generation, node_id=0, step=step) | {"time": BEGAN + now}]
            while at + 10 * seconds <= min(now, 60 + TRAINING + EVALUATION):
                step, at = step + 10, at + 10 * seconds
                lines.append(event("step", 0, generation, step=step, step_seconds=seconds) | {"time": BEGAN + at})
            if generation == 1 and at > 60 + TRAINING / 2:
                at, number, generation = at + EVALUATION, 0, 2
            number += 1
            (folder / event_file(generation, 0, number)).write_text("\n".join(map(json.dumps, lines)))
        yield BEGAN + 60.0 * minute


@pytest.mark.parametrize(
    ("seconds", "remote", "over", "expected"),
    [
        (30.0, True, 0.45, ["projected 25%", "actual 25%"]),
        (120.0, True, 0.45, ["projected 25%", "actual 25%"]),
        (30.0, True, 0.0, []),
    ],
)
def test_slow_steps_are_projected_however_many_files_are_between_their_reports(
    tmp_path: Path, seconds: float, remote: bool, over: float, expected: list[str]
):
    """A job of two hours, so much more than estimated, whose pauses are planned. What was read is lost once."""
    rundir, look, told = RunDir(str(tmp_path)), dict[str, Any](), list[str]()
    hours = 2 / (1 + over)
    plan = {
        "estimate": {"usd": {"expected": 2 * 3.06 * hours}, "seconds": {"expected": 3600 * hours}},
        "work": {"steps": int(TRAINING / seconds), "evaluations": 2},
        "phases": {"startup": 60.0, "evaluation": 2 * EVALUATION},
    }
    said = []
    for now in two_hours(rundir, seconds, remote):
        is_lost = now == BEGAN + 5400 and seconds <= 30
        if is_lost:
            _READ.clear()
            look = {}
        usage = [NodeUsage(node_id=n, sku="Standard_NC6s_v3", started_at=BEGAN, ended_at=now) for n in range(2)]
        tracker = CostTracker("c", usage, "dedicated")
        projection, due, look = judge_cost(rundir, plan, tracker, look | {"told": told})
        assert projection.counts or not is_lost
        for item in due:
            told += item.covers
            said.append(f"{item.kind} {item.threshold:.0%}")
    assert said == expected


def test_an_overruns_check_says_what_its_savings_are_of():
    overrun = Overrun(kind="actual", threshold=1.0, fraction=1.5, covers=())
    projection = Projection(so_far=5.0, estimated=2.0)
    change = Change(name="Spot", setting="tier", time=1.0, cost=0.25, run_seconds=9.0, run_usd=4.0)
    for advice, begins in (
        ((change,), "of what is left, continued from the checkpoint:\n\n| what"),
        ((), "These figures"),
    ):
        shown: Any = _check("train-1", overrun, projection, advice, {}).metadata["what_to_do"].value
        assert shown.startswith(begins)


@pytest.mark.parametrize("fails", ["the record in the run directory", "the check"])
def test_people_are_told_of_an_overrun_once_whatever_fails_beside(
    manager: GPUClusterManager, settings: Settings, monkeypatch: pytest.MonkeyPatch, fails: str
):
    manager.provision_cluster(2, "Standard_NC6s_v3")
    rundir = RunDir(f"{settings.jobs_uri}/{run_sleeper(manager, settings, 60)}")
    rundir.write_json(PLAN, {"tier": "dedicated", "estimate": {"usd": {"expected": 1e-9}}})
    write = Storage.write

    def disk_full(storage: Storage, name: str, data: bytes) -> None:
        if name == COST_TOLD:
            raise OSError(errno.ENOSPC, "no space left on device")
        write(storage, name, data)

    with web_hook() as (url, heard), dg.DagsterInstance.ephemeral() as instance:
        settings = settings.model_copy(update={"notify": url})
        sensor = build_cost_overrun_sensor()

        def look(cursor: str | None) -> str:
            with dg.build_sensor_context(instance, cursor, resources=build_resources(settings)) as context:
                return str(sensor.evaluate_tick(context).cursor)

        with monkeypatch.context() as patch:
            if fails == "the check":
                patch.setattr(instance, "report_runless_asset_event", lambda _: 1 / 0)
            else:
                patch.setattr(Storage, "write", disk_full)
            cursor = look(None)
            assert len(heard) == 1
            cursor = look(cursor)
        look(cursor)
    assert len(heard) == 1


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
        assert json.loads(taken_over.cursor)["orphans"] == {}
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

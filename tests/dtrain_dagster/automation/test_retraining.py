"""When a model is trained again: schedule and sensors, evaluated as the daemon does, over real instances and files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import pytest
from dagster._core.events import DagsterEventType
from werkzeug import Request, Response

from dtrain_dagster.automation.capacity_queue import WaitingList, new_ticket
from dtrain_dagster.automation.retraining import CAUSE_TAG
from dtrain_dagster.automation.run_liveness import ON_NODES, planned_assets
from dtrain_dagster.clusters.base import OWNER, JobState, JobStatus
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.notices import NOTICES, tell
from dtrain_dagster.data.sources import PriceFile
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.retraining import build_weekly_schedule, look
from dtrain_dagster.settings.environment import Settings
from tests.loopback import LoopbackServer
from tests.trained import record_training, sha256
from tests.webhook import web_hook
from trainer.rundir import LAUNCH, STATUS, RunDir

MINUTE, DAY = 60.0, 86400.0


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class World:
    """An instance, a price file, and sensors that are evaluated when the test says so."""

    def __init__(self, home: Path, instance: dg.DagsterInstance, clock: Clock, notify: str = "") -> None:
        self.prices = home / "prices.csv"
        self.prices.write_text("date,A\n2020-01-02,1\n")
        self.settings = Settings(home=home, prices=str(self.prices), notify=notify, retrain_budget_usd=2.5)
        self.defs = build_defs(self.settings)
        self.instance, self.clock = instance, clock
        self.cursors: dict[str, str | None] = {}

    def tick(self, name: str, minutes: float = 0) -> Any:
        self.clock.now += minutes * MINUTE
        sensor = self.defs.resolve_sensor_def(name)
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursors.get(name), resources=build_resources(self.settings)
        ) as context:
            result = sensor.evaluate_tick(context)
        self.cursors[name] = result.cursor
        return result

    def add_run(
        self, request: dg.RunRequest, status: dg.DagsterRunStatus, job: dg.JobDefinition | None = None
    ) -> dg.DagsterRun:
        """As the daemon makes one of a request."""
        job = job or self.defs.resolve_job_def("train")
        run = self.instance.create_run_for_job(job, status=status, tags=dict(request.tags))
        self.instance.report_engine_event("launched", run)
        return run

    def sees_failure(self, run: dg.DagsterRun) -> None:
        """The sensor of failures has its turn."""
        [record] = self.instance.get_records_for_run(run.run_id, of_type=DagsterEventType.RUN_FAILURE).records
        event, now = record.event_log_entry.dagster_event, self.instance.get_run_by_id(run.run_id)
        assert event is not None
        assert now is not None
        context = dg.build_run_status_sensor_context(
            "retraining_failed", event, self.instance, now, resources=build_resources(self.settings)
        )
        self.defs.resolve_sensor_def("retraining_failed")(context.for_run_failure())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, list[dict[str, Any]]]]:
    clock = Clock(time.time())
    monkeypatch.setattr("time.time", clock)
    with web_hook() as (url, heard), dg.DagsterInstance.ephemeral() as instance:
        yield World(tmp_path, instance, clock, url), heard


def test_new_content_retrains_once_it_is_quiet(world: tuple[World, list[dict[str, Any]]]):
    here, heard = world
    assert "read once it has not changed" in here.tick("new_data").skip_message
    assert "nothing was trained" in here.tick("new_data", minutes=10).skip_message
    record_training(here.instance, here.settings.shared_uri, sha256(here.prices), "2020-01-02")
    assert "is what the latest training had" in here.tick("new_data", minutes=1).skip_message

    here.prices.touch()
    assert "another 10 min" in here.tick("new_data", minutes=1).skip_message
    assert "is what the latest training had" in here.tick("new_data", minutes=11).skip_message, "touched, not changed"

    for day in range(3, 20):  # written every minute: never quiet for ten
        with here.prices.open("a") as file:
            file.write(f"2020-01-{day:02d},1\n")
        assert not here.tick("new_data", minutes=1).run_requests
    assert not here.tick("new_data", minutes=9).run_requests
    here.cursors.clear()  # a lost cursor costs a pause, and no run
    assert not here.tick("new_data", minutes=9).run_requests
    [request] = here.tick("new_data", minutes=11).run_requests
    assert request.run_key == request.tags[CAUSE_TAG] == f"data-{sha256(here.prices)[:16]}"
    assert request.run_config == {"ops": {"cost_estimate": {"config": {"budget_usd": 2.5}}}}

    run = here.add_run(request, dg.DagsterRunStatus.STARTED)
    here.instance.report_run_failed(run, "the node burnt down")
    here.cursors.clear()
    here.tick("new_data")
    assert here.tick("new_data", minutes=7 * 24 * 60).run_requests == [request], "Dagster starts a key's run once"
    assert not heard


def test_what_failed_is_told_and_not_tried_again(world: tuple[World, list[dict[str, Any]]]):
    here, heard = world
    record_training(here.instance, here.settings.shared_uri, "0" * 64, "2020-01-02")
    here.clock.now += 31 * DAY
    [request] = here.tick("staleness").run_requests
    assert request.tags[CAUSE_TAG] == request.run_key
    run = here.add_run(request, dg.DagsterRunStatus.STARTED)
    here.instance.report_run_failed(run, "disk full, password=hunter22")
    here.sees_failure(run)
    assert [item["title"] for item in heard] == ["dtrain: a retraining has failed"]
    assert f"{request.run_key}: disk full, password=[secret]" in heard[-1]["message"]
    assert run.run_id in heard[-1]["message"]
    assert "not tried again before its next cause; to train now, launch the job train." in heard[-1]["message"]
    assert here.tick("staleness", minutes=7 * 24 * 60).run_requests == [request], "Dagster starts a key's run once"
    [later] = here.tick("staleness", minutes=22 * 24 * 60).run_requests
    assert later.run_key == request.run_key.removesuffix("-1") + "-2", "one failure does not switch the trigger off"

    waiting = WaitingList(here.settings.shared_uri)
    ticket = new_ticket(run.run_id, (), {}, "no capacity", here.clock.now, 3600.0, tags=request.tags)
    waiting.put(ticket)
    here.sees_failure(run)
    assert len(heard) == 1, "a run that waits for capacity has not failed"


def test_a_failure_that_the_cluster_has_told_is_not_told_again(
    world: tuple[World, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
):
    here, heard = world
    record_training(here.instance, here.settings.shared_uri, "0" * 64, "2020-01-02")
    here.clock.now += 31 * DAY
    [request] = here.tick("staleness").run_requests
    run = here.add_run(request, dg.DagsterRunStatus.STARTED)
    here.instance.add_run_tags(run.run_id, {JOB_TAG: "job"})
    rundir = RunDir(f"{here.settings.jobs_uri}/job")
    rundir.write_json(LAUNCH, {"job_id": "job", "launch": 2, "node_count": 1, "sku": "Standard_NC6s_v3", "env": {}})
    status = {"job_id": "job", "state": "failed", "message": "no", "launch": 2, "started_at": 1.0, "ended_at": 2.0}
    rundir.write_json(STATUS, {**status, "exit_code": 1, "pid": 1})
    monkeypatch.setenv("DTRAIN_NOTIFY", here.settings.notify)
    tell(rundir)
    here.instance.report_run_failed(run, "job job failed")
    here.sees_failure(run)
    assert [item["title"] for item in heard] == ["dtrain: job has failed"]
    rundir.storage.delete(NOTICES)  # nobody was told of that end
    here.sees_failure(run)
    assert heard[-1]["title"] == "dtrain: a retraining has failed"

    rundir.write_json(STATUS, {**status, "state": "succeeded", "exit_code": 0, "pid": 1})
    tell(rundir)
    here.sees_failure(run)  # a step after the training has failed
    assert [item["title"] for item in heard[-2:]] == ["dtrain: job has finished", "dtrain: a retraining has failed"]


def test_a_run_that_died_with_its_machine_is_told_once(
    world: tuple[World, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
):
    here, heard = world
    monkeypatch.setenv("DTRAIN_NOTIFY", here.settings.notify)
    record_training(here.instance, here.settings.shared_uri, "0" * 64, "2020-01-02")
    here.clock.now += 31 * DAY
    [request] = here.tick("staleness").run_requests
    dead = here.add_run(request, dg.DagsterRunStatus.STARTED).run_id
    here.add_run(dg.RunRequest(), dg.DagsterRunStatus.NOT_STARTED)
    assert f"waits for run {dead[:8]}" in here.tick("staleness", minutes=29).skip_message, "not for the one behind it"

    RunDir(f"{here.settings.jobs_uri}/job").write_json(OWNER, {"dagster_run_id": dead})
    with monkeypatch.context() as patch:
        running = [JobStatus(job_id="job", state=JobState.RUNNING)]
        patch.setattr(LocalClusterManager, "active_jobs", lambda _: running)
        assert f"waits for run {dead[:8]}" in here.tick("staleness", minutes=2).skip_message, "its job goes on"
    assert not heard
    for _ in range(2):
        said = here.tick("staleness", minutes=1).skip_message
        assert f"run {dead} has been silent for 30 min 00 s and follows no job" in said
        assert "Terminate it in Dagster's UI, then launch the job train" in said
    [message] = heard
    assert message["title"] == "dtrain: retraining waits for a silent run"
    assert f"/runs/{dead}" in message["message"]
    assert here.instance.get_run_by_id(dead).status is dg.DagsterRunStatus.STARTED, "it may live: a person decides"


def test_a_file_that_is_gone_is_taken_up_where_it_was_left(world: tuple[World, list[dict[str, Any]]]):
    here, _ = world
    record_training(here.instance, here.settings.shared_uri, sha256(here.prices), "2020-01-02")
    here.tick("new_data")
    here.tick("new_data", minutes=11)
    away = here.prices.rename(here.prices.with_suffix(".away"))
    assert "cannot be read" in here.tick("new_data", minutes=1).skip_message
    away.rename(here.prices)
    assert "read once it has not changed" in here.tick("new_data").skip_message
    assert "is what the latest training had" in here.tick("new_data", minutes=11).skip_message, "as it was before"
    here.prices.unlink()
    assert "cannot be read" in here.tick("new_data", minutes=1).skip_message
    here.prices.write_text("date,A\n2020-01-02,1\n2020-01-03,2\n")  # put in its place by a delete and a write
    here.tick("new_data", minutes=1)
    assert here.tick("new_data", minutes=11).run_requests


def test_a_file_that_is_written_while_it_is_read_is_looked_at_again(tmp_path: Path):
    path = tmp_path / "prices.csv"
    path.write_text("date,A\n")

    class Written(PriceFile):
        def digest(self) -> str:
            found = super().digest()
            path.write_text("date,A\n2020-01-02,1\n")
            return found

    source = Written(str(path))
    known, _ = look(source, {}, 0.0)
    known, why = look(source, known, 601.0)
    assert "was written while it was read" in why
    assert not known["digest"]


def test_a_cause_waits_for_a_training_that_is_under_way(world: tuple[World, list[dict[str, Any]]]):
    here, _ = world
    assert "no model was registered" in here.tick("staleness").skip_message
    record_training(here.instance, here.settings.shared_uri, "0" * 64, "2020-01-02", alias="challenger")
    here.tick("new_data")
    assert "not stale before 2 h 24 min" in here.tick("staleness", minutes=29.9 * 24 * 60).skip_message
    [by_age] = here.tick("staleness", minutes=144).run_requests
    [by_data] = here.tick("new_data").run_requests
    assert by_age.run_key.startswith("age-v1-")
    assert by_age.run_key != by_data.run_key

    run = here.add_run(by_data, dg.DagsterRunStatus.STARTED)
    assert f"waits for run {run.run_id[:8]}" in here.tick("staleness").skip_message
    here.instance.report_run_canceled(run)
    waiting = WaitingList(here.settings.shared_uri)
    waiting.put(new_ticket(run.run_id, (), {}, "no capacity", here.clock.now, 3600.0))
    assert "waits for capacity" in here.tick("staleness").skip_message
    waiting.remove(waiting.tickets()[0].ticket)
    assert here.tick("staleness").run_requests == [by_age], "the same cause, the same key"

    record_training(here.instance, here.settings.shared_uri, sha256(here.prices), "2020-02-02", "2", "challenger")
    assert "version 2 was registered last" in here.tick("staleness").skip_message
    assert "is what the latest training had" in here.tick("new_data").skip_message


@dg.op
def copy_files() -> None:
    """A step of another team."""


@dg.job
def nightly_copy() -> None:
    """A plain job of another code location."""
    copy_files()


@dg.asset
def foreign_table() -> None:
    """An asset of another code location."""


FOREIGN = {
    "a job of ops": nightly_copy,
    "a job of assets": dg.Definitions(
        assets=[foreign_table], jobs=[dg.define_asset_job("tables")]
    ).resolve_job_def("tables"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_runs_of_others_are_left_alone(world: tuple[World, list[dict[str, Any]]], name: str):
    """They are in the same instance, and neither block a retraining nor are ended, however long they are silent."""
    here, heard = world
    record_training(here.instance, here.settings.shared_uri, "0" * 64, "2020-01-02")
    here.clock.now += 31 * DAY
    run = here.add_run(dg.RunRequest(), dg.DagsterRunStatus.STARTED, FOREIGN[name])
    [request] = here.tick("staleness").run_requests
    assert here.tick("staleness", minutes=31).run_requests == [request]
    assert here.instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.STARTED
    assert not heard


def test_what_a_run_makes(world: tuple[World, list[dict[str, Any]]]):
    here, _ = world
    started = dg.DagsterRunStatus.STARTED
    whole = here.add_run(dg.RunRequest(), started)
    assert {dg.AssetKey("trained_checkpoint"), dg.AssetKey("cost_estimate")} <= planned_assets(here.instance, whole)
    graph = here.defs.resolve_asset_graph().get_all_asset_keys()
    assert {dg.AssetKey(name) for name in ON_NODES if name != "program_run"} <= graph, "they exist under these names"
    part = whole._replace(asset_selection=frozenset({dg.AssetKey("hyperparameter_search")}))
    assert planned_assets(here.instance, part) == {dg.AssetKey("hyperparameter_search")}
    assert planned_assets(here.instance, here.add_run(dg.RunRequest(), started, nightly_copy)) == set()


def test_the_week_asks_for_one_run_with_the_budget_unless_a_training_is_under_way(tmp_path: Path):
    settings = Settings(home=tmp_path, retrain_budget_usd=3)
    schedule, resources = build_weekly_schedule(settings), build_resources(settings)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:

        def tick(week: int) -> Any:
            moment = datetime(2026, 3, week * 7, 6, tzinfo=ZoneInfo("America/New_York"))
            with dg.build_schedule_context(instance, moment, resources=resources) as context:
                return schedule.evaluate_tick(context)

        [request] = tick(1).run_requests
        assert request.run_key == "weekly-20260307T1100Z"
        assert request.run_config["ops"]["cost_estimate"]["config"] == {"budget_usd": 3}
        job = build_defs(settings).resolve_job_def("train")
        run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=dict(request.tags))
        assert f"waits for run {run.run_id[:8]}" in tick(2).skip_message


@contextmanager
def file_server(content: dict[str, Any]) -> Iterator[str]:
    """The address of a file on a loopback server; ``content`` holds its bytes and headers, or a status."""

    def answer(_: Request) -> Response:
        return Response(content["body"], content.get("status", 200), content["headers"])

    with LoopbackServer(answer) as server:
        yield server.url_for("/prices.csv")


@pytest.mark.parametrize("mark", ["ETag", "Last-Modified", None])
def test_a_file_on_a_web_server_is_told_by_its_marks(mark: str | None):
    content: dict[str, Any] = {"body": b"first", "headers": {mark: '"1"'} if mark else {}}
    with file_server(content) as address:
        source = PriceFile(address)
        first, digest = source.version(), source.digest()
        assert source.version() == first
        content["body"] = b"later"
        assert (source.version() == first) == bool(mark), "without a mark its content is read"
        assert source.digest() != digest
        if mark:
            content["headers"] = {mark: '"2"'}
            assert source.version() != first
        content["status"] = 404
        with pytest.raises(FileNotFoundError):
            source.version()


def test_what_spends_money_waits_to_be_switched_on_and_says_its_budget(tmp_path: Path):
    for budget, said in ((0.0, "No budget is set (DTRAIN_RETRAIN_BUDGET_USD)"), (5.0, "A plan above $5.00")):
        defs = build_defs(Settings(home=tmp_path, retrain_budget_usd=budget))
        for name in ("new_data", "staleness"):
            sensor = defs.resolve_sensor_def(name)
            assert sensor.default_status is dg.DefaultSensorStatus.STOPPED
            assert said in (sensor.description or "")
        schedule = defs.resolve_schedule_def("weekly_retraining")
        assert (schedule.cron_schedule, schedule.job_name) == ("0 6 * * 6", "train")
        assert schedule.default_status is dg.DefaultScheduleStatus.STOPPED
        assert said in (schedule.description or "")

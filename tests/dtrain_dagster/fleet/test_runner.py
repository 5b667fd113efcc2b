"""Fleets of real processes on the local cluster: what is begun, paused, continued, ended, and what outlives a kill."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from told_events import START, event, told, write_run

from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.money import USD
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.runner import FleetRunner
from dtrain_dagster.fleet.source import JobSource, ListedJobs
from dtrain_dagster.fleet.view import FleetWatch
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.documents.events import EvaluationEvent
from trainer.rundir import LIMIT

LIMITS = FleetLimits(budget_usd=1.0, nodes=2, usd_per_node_hour=3.06, margin_seconds=5.0)
ROOT = Path(__file__).parents[3]
WORK = Path(__file__).parent / "small_work.py"


def job_of(home: Path, job_id: str, seconds: float, ending: str = "succeeds", **fields: Any) -> FleetJob:
    """A job that works that long on any number of nodes."""
    job = JobConfig(
        job_id=job_id,
        run_dir=str(home / "storage" / "jobs" / job_id),
        dataset=DatasetRef(uri="script:small_work.py"),
        model=FactoryConfig(factory="tcn"),
        loss=FactoryConfig(factory="student_t"),
        training=DistributedTrainingConfig(world_size=2),
        tracking=TrackingConfig(tensorboard=False),
    )
    command = (sys.executable, str(WORK), str(seconds), ending)
    usual = {"job_id": job_id, "node_seconds": seconds, "startup_seconds": 2.0, "config": job, "command": command}
    return FleetJob(**{**usual, **fields})


class Stage:
    """A home with a local cluster and one fleet."""

    def __init__(self, home: Path, limits: FleetLimits = LIMITS) -> None:
        self.home, self.limits = home, limits
        self.manager = LocalClusterManager(home)
        self.records = FleetRecords(home, "small")
        self.records.write_limits(limits, time.time())
        self.told: list[str] = []

    def runner(self, source: Any) -> FleetRunner:
        return FleetRunner(self.manager, self.records, source, self.told.append, env={"PYTHONPATH": str(ROOT)})

    def states(self) -> dict[str, str]:
        return {item.job_id: str(item.state) for item in self.records.standings()}

    def launches(self) -> dict[str, int]:
        """The launches that had nodes, by the records of the nodes themselves."""
        ids = [item.job_id for item in self.records.standings() if item.launches]
        return {name: len({node.launch for node in self.manager.rundir(name).nodes()}) for name in ids}

    def bill(self) -> float:
        """What all jobs cost, in dollars, by the records of the nodes themselves."""
        ids = [item.job_id for item in self.records.standings() if item.launches]
        return sum(CostTracker("", self.manager.node_usage(name), "dedicated").total_usd for name in ids)

    def most_nodes(self) -> int:
        """The most nodes that were there at once."""
        ids = [item.job_id for item in self.records.standings() if item.launches]
        spans = [(node.started_at, node.ended_at) for name in ids for node in self.manager.node_usage(name)]
        return max((sum(b <= began < e for b, e in spans) for began, _ in spans), default=0)


def look_until(runner: FleetRunner, is_so: Callable[[], object]) -> None:
    while not is_so():
        runner.look(time.time())
        time.sleep(0.1)


@pytest.fixture
def stage(tmp_path: Path) -> Iterable[Stage]:
    made = Stage(tmp_path / "home")
    yield made
    made.manager.cleanup_cluster()


@pytest.mark.slow
def test_jobs_share_the_nodes_and_each_is_paid_to_the_microsecond(stage: Stage):
    jobs = [job_of(stage.home, f"j{number}", 0.4) for number in range(3)]
    jobs.append(job_of(stage.home, "bad", 0.1, ending="fails"))
    jobs.append(job_of(stage.home, "wide", 0.1, nodes=3))
    stage.runner(ListedJobs(jobs)).run()
    assert stage.states() == {"j0": "succeeded", "j1": "succeeded", "j2": "succeeded", "bad": "failed", "wide": "ended"}
    view = FleetWatch(stage.records).view()
    reasons = {job.job_id: job.why for job in view.jobs}
    assert "it was to fail" in reasons["bad"]
    assert reasons["wide"] == "it needs 3 nodes, but the fleet has 2"
    assert stage.launches() == {"j0": 1, "j1": 1, "j2": 1, "bad": 1}
    assert view.used_usd == pytest.approx(stage.bill(), abs=1e-12)
    assert view.promised_usd == view.used_usd, "what was not used has come back"
    assert stage.most_nodes() <= 2
    (stage.home / "storage" / "jobs" / "j0" / "launch.json").write_text("{")
    assert [job.state for job in FleetWatch(stage.records).view().jobs] == [job.state for job in view.jobs]


class LaterSource(JobSource):
    """One job, and a second one as soon as the first was judged or has ended."""

    def __init__(self, low: FleetJob, high: FleetJob) -> None:
        self.left, self.high = [low], [high]
        self.told: list[tuple[str, str]] = []

    def resume(self, given: Sequence[FleetJob]) -> Sequence[str]:
        ids = [job.job_id for job in given]
        self.left, self.high = ([job for job in jobs if job.job_id not in ids] for jobs in (self.left, self.high))
        return ids

    def next_job(self) -> FleetJob | None:
        return self.left.pop() if self.left else None

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> str:
        if self.high:
            self.left.append(self.high.pop())
        return ""

    def on_end(self, standing: Standing, evaluations: Sequence[EvaluationEvent]) -> None:
        self.judge(standing.job_id, evaluations)
        self.told.append((standing.job_id, str(standing.state)))


@pytest.mark.slow
def test_a_job_that_comes_to_its_limit_goes_on_where_it_was(stage: Stage):
    runner = stage.runner(ListedJobs([job_of(stage.home, "one", 20.0, node_seconds=60.0, nodes=2)]))
    rundir = stage.manager.rundir("one")
    look_until(runner, lambda: list(rundir.events("step")))
    stage.manager.cancel_job("one")  # as its nodes do at their limit: this work knows none
    rundir.write_json("result.json", {"status": "budget"})
    rundir.write_json(LIMIT, {"max_node_seconds": 1.0})  # where it stopped: its next limit is beyond that
    look_until(runner, lambda: runner.jobs["one"].launches == 2)
    done = (rundir.read_json("progress.json") or {})["done"]
    assert 0 < done < 20
    while len(list(rundir.events("step"))) < 2:
        time.sleep(0.1)
    stage.manager.cancel_job("one")  # it need not take its time; a person's own cancellation is not undone
    rundir.storage.delete("result.json")
    runner.run()
    assert stage.states() == {"one": "ended"}
    assert stage.launches() == {"one": 2}
    assert stage.most_nodes() == 2, "never four at once"
    steps = [item["step"] for item in rundir.events("step")]
    assert steps == [1, 1 + int(10 * done)], "its second launch goes on where the first was"


def test_a_fleet_of_an_older_version_is_refused_in_a_sentence(stage: Stage):
    stage.records.add(job_of(stage.home, "old", 10.0), 0)
    path = stage.home / "fleets" / "small" / "jobs" / "old.json"
    document = json.loads(path.read_text())
    document["job"] |= {"least_nodes": 2}
    path.write_text(json.dumps(document))
    with pytest.raises(FleetError, match=r"begun by an older version.*another name"):
        stage.records.standings()


def test_why_a_job_waits_follows_from_what_those_that_run_have_told(tmp_path: Path):
    records, budget = FleetRecords(tmp_path, "small"), replace(LIMITS, budget_usd=10.0, usd_per_node_hour=3.6)
    records.write_limits(budget, START)
    runs = records.add(job_of(tmp_path, "runs", 8000.0), 0)
    records.add(job_of(tmp_path, "wide", 200.0, nodes=2), 1)
    records.keep(replace(runs, state=FleetState.RUNNING, nodes=1, grant_units=USD, launches=1, launched_at=START - 1.0))
    watch = FleetWatch(records)
    rundir = write_run(tmp_path / "storage" / "jobs", "runs", [])
    for node in rundir.storage.list("nodes"):
        rundir.storage.delete(f"nodes/{node}")
    assert watch.view(START).jobs[1].why == "waits: the rest of the budget is needed by jobs ahead of it"
    rundir.append_events(1, 0, 2, told(20))
    assert watch.view(START + 30.0).jobs[1].why == "waits: it needs 2 nodes, and 1 is free"


def test_the_speed_of_a_job_is_believed_from_its_third_report_and_not_while_it_finishes(tmp_path: Path):
    """The first step of a training takes many times as long as others, and promises are not taken back."""
    records = FleetRecords(tmp_path, "small")
    records.write_limits(replace(LIMITS, budget_usd=10.0, usd_per_node_hour=3.6), START)
    runs = records.add(job_of(tmp_path, "runs", 3000.0), 0)
    records.keep(replace(runs, state=FleetState.RUNNING, nodes=1, grant_units=USD, launches=1, launched_at=START - 1.0))
    watch = FleetWatch(records)
    rundir = write_run(tmp_path / "storage" / "jobs", "runs", [])
    reports = [item | ({"step_seconds": 12.0} if item["step"] == 5 else {}) for item in told(3)]
    for number in range(3):
        rundir.append_events(1, 0, number + 2, [item for item in reports if item["step"] == 5 * (number + 1)])
        expected = 3000.0 if number < 2 else 0.2 * (10_000 - 15)
        assert watch.view(START + number).jobs[0].seconds_left == pytest.approx(expected, rel=0.01)
    rundir.append_events(1, 0, 5, [event("finish", START + 9.0, stage="test split")])
    assert watch.view(START + 60.0).jobs[0].seconds_left is None
    [standing] = records.standings()
    assert watch._followers["runs"].stands(standing, START + 60.0).left_node_seconds == 0.0


class _KilledError(BaseException):
    """The orchestrator is gone."""


def test_an_orchestrator_killed_after_each_thing_it_does_buys_nothing_twice_and_forgets_no_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    write, submit = FleetRecords._write, LocalClusterManager.submit_job

    def write_and_die(self: FleetRecords, name: str, document: Any) -> None:
        write(self, name, document)
        raise _KilledError

    def submit_and_die(self: LocalClusterManager, spec: Any) -> None:
        submit(self, spec)
        raise _KilledError

    monkeypatch.setattr(FleetRecords, "_write", write_and_die)
    monkeypatch.setattr(LocalClusterManager, "submit_job", submit_and_die)
    sources, deaths, over = [], 0, False
    while not over:
        assert deaths < 60
        sources.append(LaterSource(job_of(stage.home, "one", 0.3), job_of(stage.home, "two", 0.3)))
        try:
            runner = stage.runner(sources[-1])
            while not over:
                over = runner.look(time.time())
                time.sleep(0.05)
        except _KilledError:
            deaths += 1
    assert deaths >= 8, "two jobs, each: written, granted, submitted, settled"
    assert stage.states() == {"one": "succeeded", "two": "succeeded"}
    assert stage.launches() == {"one": 1, "two": 1}
    assert sorted(sources[-1].told) == [("one", "succeeded"), ("two", "succeeded")]
    assert stage.records.limits() == LIMITS


class EndingSource(ListedJobs):
    """Ends a job as soon as it was judged."""

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> str:
        return "it learns nothing" if job_id == "dull" else ""


def test_a_job_that_its_source_has_seen_enough_of_is_ended_and_its_dollars_come_back(stage: Stage):
    jobs = [job_of(stage.home, "dull", 60.0), job_of(stage.home, "good", 0.3)]
    stage.runner(EndingSource(jobs)).run()
    view = {job.job_id: job for job in FleetWatch(stage.records).view().jobs}
    assert (view["dull"].state, view["dull"].why) == ("ended", "it learns nothing")
    assert view["good"].state == "succeeded"
    assert view["dull"].promised_usd == view["dull"].usd < 0.05


@pytest.fixture
def dear_stage(tmp_path: Path) -> Iterable[Stage]:
    """A fleet that may buy nodes of four times the price of those that it gets."""
    made = Stage(tmp_path / "home", replace(LIMITS, usd_per_node_hour=12.24))
    yield made
    made.manager.cleanup_cluster()


def test_nodes_that_cost_less_than_the_dearest_are_told_more_as_less_is_paid(
    dear_stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    stage = dear_stage
    monkeypatch.setattr("dtrain_dagster.fleet.runner.LIMIT_CHANGE_SHARE", 0.0)
    runner = stage.runner(ListedJobs([job_of(stage.home, "one", 60.0)]))
    look_until(runner, stage.manager.rundir("one").nodes)
    time.sleep(1.0)
    runner.look(time.time())
    standing = runner.jobs["one"]
    told = (stage.manager.rundir("one").read_json("budget.json") or {})["max_node_seconds"]
    whole = stage.limits.seconds_of(standing.grant_units) - standing.nodes * stage.limits.margin_seconds
    assert told == pytest.approx(whole + 0.75 * standing.node_seconds, abs=0.5), "a quarter of the price was paid"
    view = FleetWatch(stage.records).view()
    assert view.used_usd == pytest.approx(stage.bill(), rel=0.2), "priced as what came"


def test_nodes_that_go_on_after_their_limit_are_asked_to_leave(stage: Stage):
    runner = stage.runner(ListedJobs([job_of(stage.home, "one", 60.0)]))
    look_until(runner, stage.manager.rundir("one").nodes)
    runner.jobs["one"] = replace(runner.jobs["one"], grant_units=1)
    look_until(runner, lambda: stage.states()["one"] == "pausing")
    stage.records.ask_to_cancel()
    runner.run()
    assert stage.states() == {"one": "ended"}


def test_a_fleet_that_is_cancelled_ends_all_its_jobs(stage: Stage):
    runner = stage.runner(ListedJobs([job_of(stage.home, f"j{number}", 60.0) for number in range(3)]))
    look_until(runner, lambda: "running" in stage.states().values())
    stage.records.ask_to_cancel()
    runner.run()
    assert set(stage.states().values()) == {"ended"}
    assert not stage.manager.active_jobs()


def test_a_supervisor_that_is_killed_is_no_failure_of_the_job(stage: Stage):
    runner = stage.runner(ListedJobs([job_of(stage.home, "one", 60.0)]))
    rundir = stage.manager.rundir("one")
    look_until(runner, rundir.nodes)
    from dtrain_dagster.clusters.supervision.launch import signal_supervisor

    signal_supervisor(rundir, 9)  # type: ignore[arg-type]
    look_until(runner, lambda: stage.states()["one"] == "paused")
    rundir.write_json("progress.json", {"done": 60.0})
    runner.run()
    assert stage.states() == {"one": "succeeded"}
    assert stage.launches() == {"one": 2}


def test_a_fleet_has_one_orchestrator_and_one_list_of_jobs(stage: Stage):
    with stage.records.sole_orchestrator():
        assert stage.records.is_run()
        other = FleetRecords(stage.home, "small")
        with pytest.raises(FleetError, match="run by another process"), other.sole_orchestrator():
            pass
    assert not stage.records.is_run()
    runner = stage.runner(ListedJobs([job_of(stage.home, "one", 0.1)]))
    runner.look(time.time())
    with pytest.raises(FleetError, match="job one was given before, and is not there now"):
        stage.runner(ListedJobs([job_of(stage.home, "two", 0.1)]))
    runner.run()
    with pytest.raises(FleetError, match="'new' was given twice"):
        stage.runner(ListedJobs([job_of(stage.home, name, 0.1) for name in ("one", "new", "new")])).look(time.time())
    with pytest.raises(FleetError, match="budget_usd is 1e-06"):
        stage.records.write_limits(replace(LIMITS, budget_usd=1e-6), time.time())
    assert FleetState(stage.states()["one"]).is_final

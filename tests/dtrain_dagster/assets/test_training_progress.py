"""A job that is followed in Dagster: what people are told, by what way, and how often."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets import training_progress
from dtrain_dagster.assets.checks import communication_check
from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.training_progress import (
    MOST_NEWS,
    TOLD,
    follow,
    follow_training,
    log_of,
    tell_news,
    tell_of,
)
from dtrain_dagster.clusters.base import ClusterError, JobSpec
from dtrain_dagster.costs.estimate import Estimate, Interval, Work
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.jobs.view import JobView, fold
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from tests.dtrain_dagster.simulated_timing import Simulation
from tests.webhook import web_hook
from trainer.rundir import RESULT, RunDir

TRAINING = {"gradient_accumulation_steps": 2, "batch_size_per_gpu": 128}
SLOW_NETWORK = Simulation(windows=14, buckets=(60_000_000,), late_compute={1: 0.06})


@pytest.fixture
def heard() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with web_hook() as found:
        yield found


def test_the_first_to_see_it_tells_by_log_check_and_message_and_nobody_tells_again(
    tmp_path: Path, heard: tuple[str, list[dict[str, Any]]]
):
    address, messages = heard
    rundir = RunDir(str(tmp_path / "train-1"))
    rundir.make()

    @dg.asset(name="job", check_specs=[dg.AssetCheckSpec("communication_within_limits", asset="job")])
    def followed(context: dg.AssetExecutionContext):
        progress, told = JobView(), rundir.read_json(TOLD) or {}
        for item in SLOW_NETWORK.events():
            progress = fold(progress, [item])
            tell_of(progress.recent, told, context, rundir, TRAINING, [address])
        return dg.MaterializeResult(check_results=[communication_check(SLOW_NETWORK.events(), TRAINING)])

    with dg.DagsterInstance.ephemeral() as instance:
        first, again = (dg.materialize([followed], instance=instance) for _ in range(2))
        key = dg.AssetCheckKey(dg.AssetKey("job"), "communication_within_limits")
        records = [*instance.all_logs(first.run_id), *instance.all_logs(again.run_id)]
        kept = instance.event_log_storage.get_asset_check_execution_history(key, limit=9)

    live, final = first.get_asset_check_evaluations()
    assert not live.passed
    assert not final.passed
    assert live.severity is dg.AssetCheckSeverity.WARN
    assert live.metadata["communication_percent"].value > 20
    advice = str(live.metadata["strategies"].value)
    assert advice.index("**replace node 11**") < advice.index("**top-k compression**"), "each part has its own advice"
    assert len(again.get_asset_check_evaluations()) == 1, "told before: only the job's end is judged again"
    assert len(kept) == 2, "one for each run"

    titles = [item["title"] for item in messages]
    assert len(titles) == 2
    assert any("communication takes" in title for title in titles)
    assert any("slow compute on rank 1 (node 11)" in title for title in titles)
    warnings = [record.user_message for record in records if record.level == logging.WARNING]
    assert [text.split(": ")[1].split(" ")[0] for text in warnings] == ["communication", "slow"]
    assert set(rundir.read_json(TOLD) or {}) == {"communication", "slow compute 11"}


def test_lost_nodes_are_sent_once_whoever_follows_and_not_without_end(
    tmp_path: Path, heard: tuple[str, list[dict[str, Any]]]
):
    address, messages = heard
    rundir = RunDir(str(tmp_path / "train-1"))
    rundir.make()

    @dg.asset(name="job")
    def followed(context: dg.AssetExecutionContext):
        told = rundir.read_json(TOLD) or {}
        tell_news(["generation 2: lost node(s) 1"], told, context, rundir, [address])
        tell_news([f"generation {number}: lost node(s) 1" for number in range(2, 40)], told, context, rundir, [address])

    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(2):
            dg.materialize([followed], instance=instance)
    assert [item["title"] for item in messages] == ["dtrain: train-1"] * MOST_NEWS
    assert [item["message"].split(":")[0] for item in messages[:3]] == ["generation 2", "generation 3", "generation 4"]
    assert "only in its log" in messages[-1]["message"]


def test_a_node_that_does_no_step_shows_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_progress, "OBSERVE_EVERY_SECONDS", 0.0)
    settings = Settings(home=tmp_path, nodes=1)
    resources, run_dir = build_resources(settings), f"{settings.jobs_uri}/train-1"
    manager = resources["cluster"].manager()
    nothing = Interval(low=1e-9, expected=1e-9, high=1e-9)
    plan = TrainingPlan(
        fingerprint="",
        job={"training": {}},
        sku="Standard_NC6s_v3",
        tier="dedicated",
        node_count=1,
        processes_per_node=1,
        work=Work(steps=10, evaluations=1, checkpoints=1),
        estimate=Estimate(seconds=nothing, usd=nothing, usd_per_node_hour=3.0, node_count=1),
        basis="a test",
        price_note="",
    )

    @dg.asset(name="job")
    def followed(context: dg.AssetExecutionContext):
        manager.provision_cluster(1, "Standard_NC6s_v3")
        command = (sys.executable, "-c", "import time; time.sleep(1)")
        manager.submit_job(JobSpec(job_id="train-1", run_dir=run_dir, command=command, node_count=1))
        run = ClusterRun(context, resources["cluster"], resources["project"], manager)
        follow_training(run, RunDir(run_dir), "train-1", plan)

    try:
        result = dg.materialize([followed])
    finally:
        manager.cleanup_cluster()
    seen = [event.asset_observation_data.asset_observation.metadata for event in result.get_asset_observation_events()]
    assert seen
    assert {item["phase"].value for item in seen} == {"waiting for nodes"}
    assert not any("step" in item for item in seen)
    costs = [item["cost_so_far_usd"].value for item in seen]
    # A look at a running node may count until now, the last one counts until its end: a moment less.
    assert costs[:-1] == sorted(costs[:-1])
    assert costs[-1] > 0
    assert costs[-1] > 0


def test_a_program_that_fails_may_have_written_any_result(tmp_path: Path):
    """Of which nothing is told: it has no hard budget that it could have reached."""
    settings = Settings(home=tmp_path, nodes=1)
    resources, run_dir = build_resources(settings), f"{settings.jobs_uri}/program-1"
    manager = resources["cluster"].manager()

    @dg.asset(name="job")
    def followed(context: dg.AssetExecutionContext):
        manager.provision_cluster(1, "Standard_NC6s_v3")
        code = f"open({f'{run_dir}/{RESULT}'!r}, 'w').write('[0.93]'); raise SystemExit(7)"
        spec = JobSpec(job_id="program-1", run_dir=run_dir, command=(sys.executable, "-c", code), node_count=1)
        manager.submit_job(spec)
        run = ClusterRun(context, resources["cluster"], resources["project"], manager)
        for _ in follow(run, RunDir(run_dir), "program-1", "dedicated", lambda: None):
            pass

    try:
        with pytest.raises(dg.Failure, match="exit code 7"):
            dg.materialize([followed])
    finally:
        manager.cleanup_cluster()


def test_logs_that_cannot_be_read_hide_no_end():
    class Away:
        def job_logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
            raise ClusterError("Azure ML cannot be reached")

    assert log_of(Away(), "job-a") == "Azure ML cannot be reached"  # type: ignore[arg-type]


def test_a_job_within_the_limit_passes_and_one_without_timing_is_not_judged():
    good = communication_check(Simulation(windows=8).events(), TRAINING)
    assert good.passed
    waits = communication_check(Simulation(windows=8, late_compute={1: 0.2}).events(), TRAINING)
    assert not waits.passed
    assert waits.metadata["communication_percent"].value < 20 < waits.metadata["waiting_percent"].value
    both = waits.metadata["communication_percent"].value + waits.metadata["waiting_percent"].value
    assert waits.metadata["communication_and_waiting_percent"].value == pytest.approx(both, abs=0.02)
    assert "replace node 11" in str(waits.metadata["strategies"].value)
    assert "waiting at collectives" in waits.description
    crowded = communication_check(Simulation(windows=8, cores=2, late_compute={1: 0.2}).events(), TRAINING)
    assert crowded.passed
    assert crowded.description.startswith("ranks share cores")
    unknown = communication_check([], TRAINING)
    assert unknown.passed
    assert "not known" in str(unknown.metadata["communication_percent"].value)


def test_progress_knows_the_shares_of_the_latest_steps_only():
    events = Simulation(windows=30, late_compute={1: 0.1}, since=15).events()
    assert fold(JobView(), events).shares()["waiting"] > 0.2
    assert fold(JobView(), events[:15]).shares()["waiting"] < 0.1
    assert fold(JobView(), []).shares() == {}

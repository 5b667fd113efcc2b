"""What past runs in a Dagster instance say of a training that is planned, and how their estimates are scored."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets.checks import judged
from dtrain_dagster.assets.pipeline import STOCK
from dtrain_dagster.assets.planning import build_cost_estimate
from dtrain_dagster.cli.plan_lines import expect
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.costs.ceilings import write_ceiling
from dtrain_dagster.costs.estimate import LearnedCorrection, Sizes
from dtrain_dagster.costs.plan import PLAN, TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.jobs.orders import keep_order
from dtrain_dagster.jobs.start import fingerprint
from dtrain_dagster.planning.build_plan import sizes_of
from dtrain_dagster.planning.evidence import (
    MOST_READ,
    History,
    from_history,
    knows,
    latest_score,
    pace_mark,
    past_runs,
    past_scores,
)
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings, load_settings
from harness.small_job import train, write_dataset
from tests.page import Page
from trainer.config import JobConfig
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, RunDir

cost_estimate = build_cost_estimate(STOCK)

SKU = "Standard_NC6s_v3"
SIZES = Sizes(
    train_samples=100, valid_samples=10, test_samples=10, batch_size_per_rank=10, micro_batches_per_rank=1,
    processes_per_node=1, epochs=1, max_steps=None, eval_frequency=None, checkpoint_frequency=10,
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunDir, JobConfig]:
    """A home whose one training really ran."""
    home = tmp_path_factory.mktemp("home")
    dataset = write_dataset(home / "dataset")
    rundir = RunDir(train(home / "storage", dataset, "train-past"))
    return home, rundir, rundir.read_job()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as made:
        yield made


def materialized(instance: dg.DagsterInstance, asset: str, **metadata: Any) -> None:
    instance.report_runless_asset_event(dg.AssetMaterialization(asset, metadata=metadata))


def write_plan(rundir: RunDir, job: JobConfig, **fields: Any) -> None:
    plan = {"pace": pace_mark(job, 1), "fingerprint": fingerprint(job, 1, 1), "sku": SKU, "node_count": 1}
    rundir.write_json(PLAN, plan | fields)
    events = list(rundir.events())
    begin, end = events[0]["time"] - 1, events[-1]["time"] + 1
    rundir.write_node(NodePresence(node_id=0, launch=1, started_at=begin, ended_at=end))


def test_trainings_of_the_same_pace(finished):
    *_, job = finished
    same = pace_mark(job, 1)

    def mark(**fields: Any) -> str:
        return pace_mark(replace(job, training=replace(job.training, **fields)), 1)

    assert mark(epochs=9, max_steps=None, seed=3, learning_rate=0.1, world_size=3, eval_frequency=7) == same
    assert mark(batch_size_per_gpu=7) != same
    assert mark(precision="bf16") != same
    assert mark(threads_per_rank=4) != same
    assert pace_mark(replace(job, model=replace(job.model, factory="lstm")), 1) != same
    assert pace_mark(job, 2) != same


def test_a_past_run_tells_how_long_a_longer_one_takes(finished, instance):
    _, rundir, job = finished
    write_plan(rundir, job)
    materialized(instance, "trained_checkpoint", run_dir=dg.MetadataValue.path("/nowhere/at/all"))
    materialized(instance, "trained_checkpoint", run_dir=dg.MetadataValue.path(rundir.uri))
    [run] = past_runs(instance, pace_mark(job, 1), SKU, keeps_cache=True)
    assert past_runs(instance, "another", SKU, keeps_cache=True) == []

    sizes = sizes_of(job, dataset_of(job).samples, 1, None)

    def told(nodes: int = 1, steps: int = 30):
        longer = replace(sizes, max_steps=steps, epochs=999)
        return from_history([run], longer, nodes, LearnedCorrection())

    own = told()
    assert (own.basis, own.rests_on) == ("history", ("train-past",))
    assert knows(own, 1)
    seconds = {item["name"]: item["seconds"] for item in rundir.events("phase")}
    [node], parts = rundir.nodes(), own.parts(1)
    wall = node.ended_at - node.started_at
    # a first evaluation that took longer than the others is part of the warm-up, and so of `parts.steps`
    measured = seconds["training"] + seconds["evaluation"] + seconds["data"]
    beside = parts.startup + parts.checkpoint + parts.finish + measured
    assert beside == pytest.approx(wall, rel=0.1), "its parts are all of its time"
    assert own.seconds_at(1).expected == parts.total
    assert told(steps=3000).seconds_at(1).expected > own.seconds_at(1).expected + 2000 * run.measured.step_seconds
    assert not knows(told(nodes=3), 3)
    assert "1 node(s) instead of 3" in told(nodes=3).basis_words
    assert past_runs(instance, pace_mark(job, 1), "Standard_NC4as_T4_v3", keeps_cache=True) == []
    newer = replace(run, job_id="newer", measured=replace(run.measured, startup_seconds=99.0))
    assert from_history([newer, run], sizes, 1, LearnedCorrection()).rests_on == ("newer",)
    assert replace(own, run_spread=0.3).seconds_at(1).high > own.seconds_at(1).high

    far, near = (
        replace(run, job_id=f"on-{count}", measured=replace(run.measured, node_count=count, step_seconds=seconds))
        for count, seconds in ((2, 1.0), (7, 5.0))
    )
    [both, alone] = (from_history(runs, sizes, 4, LearnedCorrection()) for runs in ([far, near], [near]))
    assert both.rests_on == ("on-7", "on-2"), "the nearest, as figures of other nodes are made: twice as many is as far"
    assert "on 7 node(s) instead of 4" in both.basis_words
    assert both.seconds_at(4) == alone.seconds_at(4)

    write_plan(rundir, job)
    rundir.write_node(NodePresence(node_id=0, launch=1, incarnation=2, started_at=0.0, ended_at=1.0))
    assert past_runs(instance, pace_mark(job, 1), SKU, keeps_cache=True) == [], "a node was lost: it tells of that"
    rundir.storage.delete("nodes/l0001-n000-s002.json")


def with_past_runs(home: Path, finished: tuple[Path, RunDir, JobConfig], *skus: str) -> JobConfig:
    """A home in which the training ran on nodes of each of these SKUs."""
    _, rundir, job = finished
    for number, sku in enumerate(skus):
        copied = RunDir(str(home / "storage" / "jobs" / f"past-{number}"))
        shutil.copytree(rundir.uri, copied.uri)
        write_plan(copied, job)
        copied.write_json(LAUNCH, {"launch": 1, "sku": sku})
        keep_order(home, replace(job, job_id=f"past-{number}", run_dir=copied.uri), None)
    return job


@pytest.mark.parametrize(
    ("given", "sku"),
    [
        ({"CLUSTER": "slurm", "SLURM_PARTITION": "gpu", "SLURM_OPTIONS": "prices=site.json"}, f"{SKU}@gpu"),
        ({"GPU_TYPE": SKU.upper()}, SKU),
    ],
    ids=["a site's price", "another case of letters"],
)
def test_a_homes_past_run_tells_what_the_next_costs(finished, tmp_path, monkeypatch, given, sku):
    (tmp_path / "site.json").write_text('{"gpu": 2.5}')
    monkeypatch.chdir(tmp_path)
    for name, value in given.items():
        monkeypatch.setenv(f"DTRAIN_{name}", value)
    job = with_past_runs(tmp_path, finished, sku)
    expected = expect(load_settings(home=tmp_path), job, 1)
    assert expected.price.sku == sku
    assert expected.estimate is not None
    assert "the latest past-0" in expected.lines()[1]
    assert expected.usd == pytest.approx(expected.estimate.seconds.expected / 3600 * expected.usd_per_hour)


def test_runs_on_another_sku_tell_nothing_and_hide_none_of_its_own(finished, tmp_path, instance):
    job = with_past_runs(tmp_path, finished, "Standard_NC4as_T4_v3")
    expected = expect(Settings(home=tmp_path, gpu_type=SKU), job, 1)
    assert (expected.estimate, expected.usd) == (None, None)
    assert "data and batch on this SKU" in expected.lines()[1]
    _, rundir, job = finished
    write_plan(rundir, job)
    materialized(instance, "trained_checkpoint", run_dir=dg.MetadataValue.path(rundir.uri))
    other = RunDir(str(Path(rundir.uri).with_name("train-other")))
    shutil.copytree(rundir.uri, other.uri)
    write_plan(other, job, sku="Standard_NC4as_T4_v3")
    for _ in range(MOST_READ + 1):
        materialized(instance, "trained_checkpoint", run_dir=dg.MetadataValue.path(other.uri))
    history = History.read(instance, pace_mark(job, 1), SKU, keeps_cache=True)
    assert [run.job_id for run in history.runs] == ["train-past"]
    assert history.forecast(SIZES, 1).rests_on == ("train-past",)
    shutil.rmtree(other.uri)


def told(instance: dg.DagsterInstance, mark: str, seconds: float, **fields: Any) -> None:
    """`cost_breakdown` of a run that was to take 100 s on one node of `SKU`, for a dollar."""
    said = {
        "job_id": f"train-{mark}", "fingerprint": mark, "sku": SKU, "tier": "dedicated", "planned_sku": SKU,
        "planned_tier": "dedicated", "basis": "probe", "learned_factor": 1.0, "total_usd": seconds / 100,
        "estimated_usd": 1.0, "estimated_low_usd": 0.8, "estimated_high_usd": 1.3, "wall_seconds": seconds,
        "estimated_seconds": 100.0, "launches": 1, "replaced_nodes": 0, "generations": 1,
    }  # fmt: skip
    materialized(instance, "cost_breakdown", **said | fields)


def verdict(instance: dg.DagsterInstance) -> tuple[bool, dict[str, Any]]:
    result = judged(latest_score(instance, "of another run"), past_scores(instance))
    assert result.passed or result.severity is dg.AssetCheckSeverity.WARN
    return result.passed, {name: value.value for name, value in result.metadata.items()}


def test_finished_runs_are_scored_once_and_judged_by_their_own_score(instance):
    passed, shown = verdict(instance)
    assert passed, "nothing to judge is nothing wrong"
    assert "no run yet" in shown["why"]
    told(instance, "a", 110.0, job_id="train-a-1")
    for seconds in (300.0, 200.0, 100.0):
        told(instance, "a", seconds, job_id="train-a-2", learned_factor=1.1)
    told(instance, "b", 140.0)
    past = past_scores(instance)
    assert [(item.job_id, item.learned_factor) for item in past] == [
        ("train-a-1", 1.0),
        ("train-a-2", 1.1),
        ("train-b", 1.0),
    ]
    passed, shown = verdict(instance)
    assert not passed
    assert (shown["job_id"], shown["usd_error_percent"], shown["seconds_error_percent"]) == ("train-b", 40.0, 40.0)
    assert (shown["runs"], shown["median_error_percent"], shown["coverage_90_percent"]) == (3, 10.0, 66.7)

    fell_back = "Standard_NC4as_T4_v3"
    for fields, why in (
        (
            {"sku": fell_back, "wall_seconds": 400.0},
            f"it ran on {fell_back} (dedicated), and the estimate was for {SKU}",
        ),
        ({"tier": "low_priority"}, "(low_priority), and the estimate was for"),
        ({"sku": f"{fell_back}, {SKU}"}, f"it ran on {fell_back}, {SKU}"),
        ({"estimated_usd": 0.0}, "too small"),
        ({"wall_seconds": 0.0}, "no record"),
    ):
        told(instance, "c", 100.0, **fields)
        passed, shown = verdict(instance)
        assert passed
        assert (shown.keys(), shown["job_id"]) == ({"job_id", "why"}, "train-c"), "another run's verdict is not its own"
        assert why in shown["why"]
    materialized(instance, "cost_breakdown", total_usd=1.0, estimated_usd=1.0)
    assert "older version" in verdict(instance)[1]["why"]
    assert past_scores(instance) == past


def test_a_run_that_was_disturbed_is_told_and_teaches_nothing(instance):
    told(instance, "a", 101.0, job_id="train-a-1")
    told(instance, "a", 172_800.0, job_id="train-a-2", launches=2)
    told(instance, "a", 500.0, job_id="train-a-3", replaced_nodes=1, generations=3)
    told(instance, "a", 200.0, job_id="train-a-4", generations=2)
    history = History(sku=SKU, runs=(), scores=tuple(past_scores(instance)))
    assert [bool(item.disturbed) for item in history.scores] == [False, True, True, True]
    assert history.learned("probe").runs == 1
    _, shown = verdict(instance)
    assert shown["runs"] == 4
    assert shown["not_learned"].startswith("nodes were lost or joined, 2 generations")


def dataset_of(job: JobConfig) -> BuiltDataset:
    uri = job.dataset.uri
    manifest = json.loads((Path(uri) / "manifest.json").read_text())
    name, samples = manifest["dataset_id"], manifest["samples"]
    return BuiltDataset(uri=uri, dataset_id=name, rows=1, samples=samples, excluded={}, built=True, shared_uri=uri)


def plan_of(
    instance: dg.DagsterInstance, home: Path, dataset: BuiltDataset, **options: Any
) -> tuple[TrainingPlan | None, list[str]]:
    """Materialize `cost_estimate` alone: the plan, if it was made, and what was logged."""

    @dg.asset
    def sharded_dataset() -> BuiltDataset:
        return dataset

    settings = Settings(home=home, nodes=1, threads_per_rank=1)
    config = {"model": "tcn", "learning_rate": 2e-3, "warmup_steps": 5, **options}
    found = dg.materialize(
        [sharded_dataset, cost_estimate],
        instance=instance,
        resources={**build_resources(settings), "io_manager": dg.mem_io_manager},
        run_config={"ops": {"cost_estimate": {"config": config}}},
        raise_on_error=False,
    )
    text = [record.user_message for record in instance.all_logs(found.run_id) if record.level >= logging.INFO]
    failures = [
        f"{event.step_failure_data.user_failure_data} {event.step_failure_data.error_display_string}"
        for event in found.get_step_failure_events()
    ]
    return (found.output_for_node("cost_estimate") if found.success else None), [*text, *failures]


@pytest.mark.slow
def test_a_plan_that_would_exceed_a_ceiling_is_refused_before_its_probe(finished, instance):
    home, _, job = finished
    write_ceiling(home, Decimal("0.0001"))
    plan, said = plan_of(instance, home, dataset_of(job))
    write_ceiling(home, None)
    assert plan is None
    assert "nothing is started: the ceiling of $0.0001 per month" in "\n".join(said)
    assert not list(home.glob("storage/jobs/probe*"))


@pytest.mark.long
def test_the_plan_rests_on_what_is_known_and_keeps_to_its_budget(finished, instance, monkeypatch):
    home, rundir, job = finished
    dataset = dataset_of(job)
    jobs = home / "storage" / "jobs"
    before = sorted(jobs.iterdir())

    plan, said = plan_of(instance, home, dataset, budget_usd=0.001)
    assert plan is None
    assert "budget_usd is $0.0010" in "\n".join(said), "five seconds of a node cost more"
    plan, said = plan_of(instance, home, dataset, stop_at_usd=0.004)
    assert plan is None
    assert "leave 4.7 node-seconds for its probe, which takes 5 s" in "\n".join(said)
    plan, said = plan_of(instance, home, dataset, probe=False)
    assert plan is None
    assert "set probe to true" in "\n".join(said)
    plan, said = plan_of(instance, home, dataset, deadline_hours=-1.0)
    assert plan is None
    assert "deadline_hours = -1.0" in "\n".join(said)
    for mistake, words in (
        ({"model_args": {"channel": 8}}, "it accepts: channels"),
        ({"epochs": 0}, "launchpad: epochs = 0: it should be greater than or equal to 1"),
        ({"more": {"epoch": 3}}, "did you mean training.epochs?"),
        ({"more": {"world_size": 1, "gradient_accumulation_steps": 5000}}, "micro-batches"),
    ):
        plan, said = plan_of(instance, home, dataset, **mistake)
        assert plan is None
        assert words in "\n".join(said), (words, said)
    with monkeypatch.context() as patch:
        patch.setenv("DTRAIN_GPU_TYPE", "Standard_NC6s_v9")
        plan, said = plan_of(instance, home, dataset)
    assert plan is None
    assert "Standard_NC6s_v9" in "\n".join(said)
    real, dear = LocalClusterManager.provision_cluster, "Standard_NC40ads_H100_v5"
    with monkeypatch.context() as patch:
        patch.setattr(
            LocalClusterManager,
            "provision_cluster",
            lambda *asked: replace(real(*asked), gpu_type=dear, tier="spot"),  # as where no other is to be had
        )
        plan, said = plan_of(instance, home, dataset)
    assert plan is None
    assert f"no spot price of {dear} in eastus" in "\n".join(said)
    assert sorted(jobs.iterdir()) == before, "no probe is run at a price that nobody knows"

    own = replace(job, dataset=replace(job.dataset, dataset_id=dataset.dataset_id))
    write_plan(rundir, own)
    materialized(instance, "trained_checkpoint", run_dir=dg.MetadataValue.path(rundir.uri))
    plan, said = plan_of(instance, home, dataset, stop_at_usd=0.001)
    assert plan is not None, said
    assert (plan.basis_kind, plan.rests_on, plan.stop_at_usd) == ("history", ("train-past",), 0.001)
    assert plan.pace == pace_mark(own, 1)
    assert json.loads(json.dumps(asdict(plan)))["estimate"]["usd"]["expected"] > 0
    assert any("may reach stop_at_usd" in text for text in said)
    page = Page(instance.get_latest_materialization_event(dg.AssetKey("cost_estimate")).asset_materialization.metadata)
    assert page["basis"] == "history"

    plan, said = plan_of(instance, home, dataset, epochs=50_000, budget_usd=0.05)
    assert plan is None
    assert "at least" in "\n".join(said)
    assert "instead of 50000" in "\n".join(said)
    assert sorted(jobs.iterdir()) == before, "nothing ran for any of these"


@pytest.mark.slow
def test_a_plan_on_spot_by_its_old_name_is_told_and_says_what_it_does_not_know(finished, instance, monkeypatch):
    home, rundir, job = finished
    monkeypatch.setenv("DTRAIN_HOME", str(home))
    dataset = dataset_of(job)
    write_plan(rundir, replace(job, dataset=replace(job.dataset, dataset_id=dataset.dataset_id)))
    materialized(instance, "trained_checkpoint", run_dir=dg.MetadataValue.path(rundir.uri))
    plan, said = plan_of(instance, home, dataset, tier="spot")
    assert plan is not None, said
    assert plan.tier == "spot"
    assert "which Azure retired on 2025-09-30; nothing is billed" in plan.price_note
    assert "to the pay-as-you-go price of $3.06 an hour; nodes may be evicted at any time" in plan.price_note
    latest = instance.get_latest_materialization_event(dg.AssetKey("cost_estimate"))
    made = Page(latest.asset_materialization.metadata)
    assert "| Spot | Spot's price varies: " in made["plan"]
    assert "this machine, priced as if it were 1 × NC6s_v3 (Spot)" in made["plan"]
    assert "on this machine, priced as if it were 1 × NC6s_v3 (Spot); from" in made["verdict"]


@pytest.mark.long
def test_a_probe_that_hangs_is_stopped_by_the_limits_and_nothing_more_is_started(finished, instance, monkeypatch):
    home, _, job = finished
    dataset = dataset_of(job)
    monkeypatch.setenv(
        "DTRAIN_FAULTS", json.dumps([{"kind": "sleep", "at": "input", "step": 5, "node": 0, "seconds": 600}])
    )
    limit = 12.0 / 3600 * price_of(SKU).usd_per_hour("dedicated")
    plan, said = plan_of(instance, home, dataset, stop_at_usd=limit)
    assert plan is None
    assert "the probe reached the limit of $0.01" in "\n".join(said), said
    [probe] = (home / "storage" / "jobs").glob("probe-*")
    [node] = RunDir(str(probe)).nodes()
    assert 5 < node.seconds(node.last_seen_at or 0.0) < 60, "of the 600 that it hangs; 12 are paid for"
    plan, said = plan_of(instance, home, dataset, stop_at_usd=limit)
    assert plan is None
    assert len(RunDir(str(probe)).nodes()) == 1, "asked again, nothing is bought"
    shutil.rmtree(probe)

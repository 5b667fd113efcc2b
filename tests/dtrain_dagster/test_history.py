"""What past runs in a Dagster instance say of a training that is planned, and how their estimates are scored."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dtrain_dagster.assets.planning import cost_estimate, sizes_of
from dtrain_dagster.assets.scoring import judged
from dtrain_dagster.clusters.local import LocalClusterManager
from dtrain_dagster.costs.estimate import Learned
from dtrain_dagster.costs.history import from_history, knows, pace_mark, past_runs, past_scores
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.jobs import PLAN, fingerprint
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings import Settings
from trainer.config import JobConfig
from trainer.rundir import NodePresence, RunDir

from .small_job import train, write_dataset

SKU = "Standard_NC6s_v3"
SPEEDS = {SKU: 1.0, "Standard_NC4as_T4_v3": 0.5}


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
    [run] = past_runs(instance, pace_mark(job, 1), keeps_cache=True)
    assert past_runs(instance, "another", keeps_cache=True) == []

    samples = json.loads((Path(job.dataset.uri) / "manifest.json").read_text())["samples"]
    sizes = sizes_of(job, samples, 1, None)

    def told(totals: tuple[float, ...] = (), sku: str = SKU, nodes: int = 1, steps: int = 30):
        longer = replace(sizes, max_steps=steps, epochs=999)
        return from_history([run], totals, longer, nodes, sku, SPEEDS.__getitem__, lambda basis: Learned())

    own = told()
    assert (own.basis, own.rests_on) == ("history", ("train-past",))
    assert knows(own, 1)
    seconds = {item["name"]: item["seconds"] for item in rundir.events("phase")}
    parts = own.parts(1)
    beside = parts.total - parts.steps + seconds["training"] + seconds["data"]
    assert beside == pytest.approx(run.wall_seconds, abs=0.05), "its parts are all of its time"
    assert own.seconds_at(1).expected == parts.total
    assert told(steps=3000).seconds_at(1).expected > own.seconds_at(1).expected + 2000 * run.measured.step_seconds
    assert told(totals=(77.0,)).seconds_at(1).expected == 77.0
    assert "this very training" in told(totals=(77.0,)).basis_words
    assert not knows(told(nodes=3), 3)
    assert "1 node(s) instead of 3" in told(nodes=3).basis_words
    other = told(sku="Standard_NC4as_T4_v3")
    assert other.basis == "table"
    assert "2 times as fast" in other.basis_words
    assert other.seconds_at(1).expected > own.seconds_at(1).expected
    gone = from_history([], (40.0, 44.0), sizes, 2, SKU, SPEEDS.__getitem__, lambda basis: Learned())
    assert gone is not None
    assert gone.seconds_at(2).expected == 42.0
    assert from_history([], (), sizes, 1, SKU, SPEEDS.__getitem__, lambda basis: Learned()) is None

    write_plan(rundir, job)
    rundir.write_node(NodePresence(node_id=0, launch=1, stay=2, started_at=0.0, ended_at=1.0))
    assert past_runs(instance, pace_mark(job, 1), keeps_cache=True) == [], "a node was lost: it tells of that"
    rundir.storage.delete("nodes/l0001-n000-s002.json")


def test_finished_runs_are_scored_and_judged(instance):
    def estimated(mark: str, factor: float) -> None:
        materialized(instance, "cost_estimate", fingerprint=mark, basis="probe", sku=SKU, learned_factor=factor)

    def cost(mark: str, usd: float, seconds: float) -> None:
        materialized(
            instance, "cost_breakdown", fingerprint=mark, total_usd=usd, estimated_usd=1.0, estimated_low_usd=0.8,
            estimated_high_usd=1.3, wall_seconds=seconds, estimated_seconds=100.0,
        )  # fmt: skip

    assert judged(past_scores(instance)).passed, "nothing to judge is nothing wrong"
    materialized(instance, "cost_breakdown", total_usd=1.0, estimated_usd=1.0)  # of an older version
    estimated("a", 1.0)
    cost("a", 1.1, 110.0)
    estimated("a", 1.1)
    cost("a", 1.0, 100.0)
    cost("unknown", 1.0, 100.0)
    estimated("b", 1.1)
    cost("b", 1.4, 140.0)
    past = past_scores(instance)
    assert [(item.fingerprint, item.score.learned_factor) for item in past] == [("a", 1.0), ("a", 1.1), ("b", 1.1)]
    result = judged([item.score for item in past])
    assert not result.passed
    assert result.severity is dg.AssetCheckSeverity.WARN
    shown = {name: value.value for name, value in result.metadata.items()}
    assert (shown["usd_error_percent"], shown["seconds_error_percent"]) == (40.0, 40.0)
    assert (shown["runs"], shown["median_error_percent"], shown["coverage_90_percent"]) == (3, 10.0, 66.7)
    assert shown["history"].startswith("![Estimates so far](data:image/svg+xml")
    assert judged([past[0].score]).passed


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


def test_the_plan_rests_on_what_is_known_and_keeps_to_its_budget(finished, instance, monkeypatch):
    home, rundir, job = finished
    manifest = json.loads((Path(job.dataset.uri) / "manifest.json").read_text())
    uri, name = job.dataset.uri, manifest["dataset_id"]
    dataset = BuiltDataset(
        uri=uri, dataset_id=name, rows=1, samples=manifest["samples"], excluded={}, built=True, shared_uri=uri
    )
    jobs = home / "storage" / "jobs"
    before = sorted(jobs.iterdir())

    plan, said = plan_of(instance, home, dataset, budget_usd=0.001)
    assert plan is None
    assert "budget_usd is $0.0010" in "\n".join(said), "five seconds of a node cost more"
    plan, said = plan_of(instance, home, dataset, probe=False)
    assert plan is None
    assert "set probe to true" in "\n".join(said)
    plan, said = plan_of(instance, home, dataset, deadline_hours=-1.0)
    assert plan is None
    assert "deadline_hours = -1.0" in "\n".join(said)
    real = LocalClusterManager.provision_cluster
    with monkeypatch.context() as patch:
        patch.setenv("DTRAIN_REGION", "westus2")
        patch.setattr(
            LocalClusterManager,
            "provision_cluster",
            lambda *asked: replace(real(*asked), tier="low_priority"),  # as where the first choice is not to be had
        )
        plan, said = plan_of(instance, home, dataset)
    assert plan is None
    assert "no low_priority price of Standard_NC6s_v3 in westus2" in "\n".join(said)
    assert sorted(jobs.iterdir()) == before, "no probe is run at a price that nobody knows"

    own = replace(job, dataset=replace(job.dataset, dataset_id=name))
    write_plan(rundir, own)
    materialized(instance, "trained_checkpoint", run_dir=dg.MetadataValue.path(rundir.uri))
    plan, said = plan_of(instance, home, dataset, stop_at_usd=0.001)
    assert plan is not None, said
    assert (plan.basis_kind, plan.rests_on, plan.stop_at_usd) == ("history", ("train-past",), 0.001)
    assert plan.pace == pace_mark(own, 1)
    assert json.loads(json.dumps(asdict(plan)))["estimate"]["usd"]["expected"] > 0
    assert any("may reach stop_at_usd" in text for text in said)
    assert instance.get_latest_materialization_event(dg.AssetKey("cost_estimate")).asset_materialization.metadata[
        "basis"
    ] == dg.TextMetadataValue("history")

    plan, said = plan_of(instance, home, dataset, epochs=5000, budget_usd=0.05)
    assert plan is None
    assert "at least" in "\n".join(said)
    assert "instead of 5000" in "\n".join(said)
    assert sorted(jobs.iterdir()) == before, "nothing ran for any of these"

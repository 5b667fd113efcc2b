"""What a plan may cost: which nodes are taken where they may be chosen, and what happens when others are to be had."""

import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest

from dtrain_dagster.assets import planning
from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.training import refuse_dearer_nodes, wanted_by_plan
from dtrain_dagster.clusters.base import ClusterConfig
from dtrain_dagster.costs.ceilings import write_ceiling
from dtrain_dagster.costs.estimate import Forecast, Interval, Measured, Sizes, estimate_cost
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.jobs.spending import open_book
from dtrain_dagster.planning.build_plan import Limits
from dtrain_dagster.planning.evidence import History
from dtrain_dagster.resources import build_resources
from dtrain_dagster.settings.environment import Settings
from tests.dtrain_dagster.planning.planned_nodes import planned_on
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, STATUS, RunDir

V100 = price_of("Standard_NC6s_v3")
SIZES = Sizes(
    train_samples=90_000, valid_samples=9_000, test_samples=9_000, batch_size_per_rank=256, micro_batches_per_rank=2,
    processes_per_node=1, epochs=6, max_steps=None, eval_frequency=None, checkpoint_frequency=100,
)  # fmt: skip
FORECAST = Forecast(
    measured=tuple(
        Measured(node_count=count, startup_seconds=60.0, step_seconds=0.5, finish_seconds=30.0) for count in (1, 4)
    ),
    sizes=SIZES,
    basis="probe",
    basis_words="",
)


def test_a_stated_world_size_makes_the_global_batch_whatever_nodes_there_are():
    stated = replace(SIZES, stated_ranks=3)
    assert stated.work(2).steps == stated.work(3).steps == SIZES.work(3).steps < SIZES.work(2).steps
    two = replace(FORECAST, sizes=stated).parts(4)
    assert two.steps == pytest.approx(stated.work(4).steps * 0.5, rel=0.01), "a measured step has the whole batch"


def plan(**limits: Any) -> TrainingPlan:
    seconds = Interval(low=3000.0, expected=3600.0, high=4000.0)
    return TrainingPlan(
        fingerprint="f", job={}, sku="Standard_NC4as_T4_v3", tier="dedicated", node_count=2, processes_per_node=1,
        work=SIZES.work(2), estimate=estimate_cost(seconds, price_of("Standard_NC4as_T4_v3"), "dedicated", 2),
        basis="", price_note="", phases={"startup": 600.0}, **limits,
    )  # fmt: skip


def run_in(home: Path) -> ClusterRun:
    """A run of Dagster, as far as it is asked."""
    resources = build_resources(Settings(home=home))
    context: Any = SimpleNamespace(run=SimpleNamespace(run_id="r", tags={}), log=logging.getLogger())
    return ClusterRun.of(context, resources["cluster"], resources["project"])


def nodes(sku: str, tier: Any = None) -> ClusterConfig:
    return ClusterConfig(
        cluster_name="c", node_count=2, gpu_type=sku, auto_scale_enabled=True, min_nodes=0, max_nodes=2,
        idle_timeout_minutes=10, tier=tier,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "sku", "tier", "refused"),
    [
        ({"budget_usd": 2.0}, "Standard_NC4as_T4_v3", None, None),
        ({"budget_usd": 2.0}, "Standard_NC40ads_H100_v5", None, None),  # 12 times as quick, 13 times as dear
        ({"budget_usd": 1.1}, "Standard_NC40ads_H100_v5", None, "budget_usd is"),
        ({"budget_usd": 2.0}, "Standard_NC6s_v3", None, "budget_usd is"),
        ({"budget_usd": 2.0}, "Standard_NC6s_v3", "low_priority", None),
        ({}, "Standard_NC6s_v3", None, None),
    ],
)
def test_other_nodes_than_planned_are_refused_where_the_plan_no_longer_fits(
    tmp_path: Path, limits: dict[str, Any], sku: str, tier: Any, refused: str | None
):
    run = run_in(tmp_path)
    with pytest.raises(dg.Failure) if refused else nullcontext() as found:
        refuse_dearer_nodes(run, plan(**limits), nodes(sku, tier))
    if found:
        said = str(found.value.description)
        assert all(word in said for word in (str(refused), f"got {sku}", "not started"))


@pytest.mark.parametrize(
    ("stop_at_usd", "ceiling", "refused"),
    [
        (0.0, "1.25", ""),
        (0.0, "1.10", "this start adds $1.17"),  # on the nodes that were got
        (0.5, "1.10", ""),  # its nodes stop there
    ],
)
def test_a_training_is_promised_what_it_is_expected_to_cost_or_where_it_stops(
    tmp_path: Path, stop_at_usd: float, ceiling: str, refused: str
):
    write_ceiling(tmp_path, Decimal(ceiling))
    run = run_in(tmp_path)
    wanted = wanted_by_plan(plan(stop_at_usd=stop_at_usd), nodes("Standard_NC40ads_H100_v5"), "job")
    with pytest.raises(dg.Failure, match=re.escape(refused)) if refused else nullcontext(), run.promising(wanted):
        (tmp_path / "started").touch()
    assert (tmp_path / "started").exists() is (not refused)
    with open_book(tmp_path) as book:
        assert ("job" in book) is (not refused)


def test_on_azure_the_first_of_its_tiers_is_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cluster = build_resources(Settings(home=tmp_path, tier="spot"))["cluster"]
    assert cluster.first_tier == "spot"  # type: ignore[attr-defined]
    on_azure = cluster.model_copy(update={"kind": "azure_ml", "azure": {"tiers": ["dedicated", "low_priority"]}})
    assert on_azure.first_tier == "dedicated"  # type: ignore[attr-defined]
    assert cluster.model_copy(update={"kind": "azure_ml"}).first_tier == "dedicated"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ceiling", "stop_at_usd", "left"),
    [
        (None, 0.0, None),
        ("100", 0.0, None),  # an hour of its nodes fits
        ("3.06", 0.0, 3600.0),
        ("3.06", 1.53, 1800.0),
        ("1.53", 3.06, 1800.0),
        ("0.001", 0.0, "this start adds $0.0085"),  # five seconds of two nodes
        ("3.06", 0.004, "leave 4.7 node-seconds for its probe"),
    ],
)
def test_a_probe_is_stopped_by_what_the_ceiling_leaves(
    tmp_path: Path, ceiling: str | None, stop_at_usd: float, left: float | str | None
):
    write_ceiling(tmp_path, None if ceiling is None else Decimal(ceiling))
    planned, config = planned_on(V100, 2, kind="local"), cast(Any, SimpleNamespace(stop_at_usd=stop_at_usd))
    refused = pytest.raises(dg.Failure, match=re.escape(left)) if isinstance(left, str) else nullcontext()
    with refused:
        found = planning.prepare_probe(run_in(tmp_path), config, planned, Limits())
        assert found == ("", left if left is None else pytest.approx(left), True)


def test_what_a_probe_has_taken_before_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rundir = RunDir(f"{tmp_path}/storage/jobs/probe--2n")
    rundir.write_json(LAUNCH, {"job_id": "probe--2n", "launch": 1, "node_count": 2, "engine": "local", "sku": V100.sku})
    rundir.write_json(STATUS, {"state": "failed", "message": "", "started_at": 1e9, "ended_at": 1e9 + 600, "pid": 1})
    for node in range(2):
        rundir.write_node(NodePresence(node_id=node, launch=1, incarnation=1, started_at=1e9, ended_at=1e9 + 600))
    asked: list[Any] = []

    def probe(*args: Any) -> Forecast:
        asked.append(args[-2])
        return FORECAST

    monkeypatch.setattr(planning, "forecast_from_probe", probe)
    config: Any = SimpleNamespace(stop_at_usd=1.53, probe=True)  # 1800 node-seconds, of which 1200 were taken
    history = History(sku=V100.sku, runs=(), scores=())
    planning.measure_pace(run_in(tmp_path), config, planned_on(V100, 2, kind="local"), history, Limits())
    assert asked == [pytest.approx(1800.0)]

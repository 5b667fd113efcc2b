"""One option has one dollar figure: in the plan's table, in its refusal, in the alert and in the advice after a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.costs.estimate import Forecast, Interval, Measured, Sizes
from dtrain_dagster.costs.prices import SkuPrice, price_of, price_table
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.monitoring.windows import settled, windows, worlds
from dtrain_dagster.planning.build_plan import Limits
from dtrain_dagster.planning.choices import Choices, compare_choices, remedies
from dtrain_dagster.planning.optimizer import ResourceOptimizer, rest_and_whole, savings
from dtrain_dagster.planning.options import BaseRun, best_of, build_options
from dtrain_dagster.planning.projection import Projection
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars
from tests.dtrain_dagster.planning.planned_nodes import planned_on
from tests.dtrain_dagster.simulated_timing import Simulation
from trainer.rundir import event

A100, V100, T4 = "Standard_NC24ads_A100_v4", "Standard_NC6s_v3", "Standard_NC4as_T4_v3"
NODES, HOURS, TODAY = 3, 10.0, date(2025, 9, 1)
GIB = 2**30
STARTUP = 600.0


@dataclass(frozen=True)
class Known:
    """A training whose time is known, on whichever nodes."""

    hours: float = HOURS
    basis: str = "probe"
    basis_words: str = "a probe"
    measured: tuple[Any, ...] = ()

    def seconds_at(self, node_count: int, speed: float = 1.0) -> Interval:
        seconds = 3600 * self.hours / speed
        return Interval(low=seconds, expected=seconds, high=seconds)


def table_of(price: SkuPrice, tier: Tier, nodes: int, forecast: Any) -> Choices:
    return compare_choices(
        planned_on(price, NODES, kind="local"), forecast, Limits(budget_usd=1e6), prices=[price], node_counts=[nodes],
        tiers=[tier], today=TODAY,
    )  # fmt: skip


def in_the_plan(price: SkuPrice, tier: Tier, nodes: int = NODES, hours: float = HOURS) -> float:
    found = table_of(price, tier, nodes, Known(hours)).cheapest_here(price.sku, tier, nodes)
    assert found
    return found.usd.expected


def in_the_refusal(price: SkuPrice, tier: Tier, nodes: int = NODES, hours: float = HOURS) -> str:
    """As a person reads it, of a plan that asks for more nodes than fit the deadline."""
    sizes = Sizes(
        train_samples=64, valid_samples=1, test_samples=1, batch_size_per_rank=64, micro_batches_per_rank=1,
        processes_per_node=1, epochs=1, max_steps=None, eval_frequency=None, checkpoint_frequency=100,
        stated_ranks=1,
    )  # fmt: skip
    measured = Measured(node_count=nodes, startup_seconds=STARTUP, step_seconds=3600 * hours - STARTUP)
    made = Forecast(measured=(measured,), sizes=sizes, basis="probe", basis_words="a probe")
    said = remedies(table_of(price, tier, nodes, made), planned_on(price, nodes + 1, tier), made)[0]
    found = re.search(r"about (\$[\d.]+)", said)
    assert found
    return found[1]


def usage_of(sku: str, hours: float = HOURS, tier: Tier = "dedicated") -> list[NodeUsage]:
    return [NodeUsage(node_id=n, sku=sku, started_at=0.0, ended_at=3600 * hours, tier=tier) for n in range(10, 13)]


def in_the_alert(
    sku: str, events: list[dict[str, Any]], hours: float = HOURS, startup: float = 0.0
) -> dict[str, float]:
    """Kind → dollars, of a job that has not done a step: all of it is what is left."""
    usd = NODES * hours * price_of(sku).usd_per_hour("dedicated")
    projection = Projection(so_far=0.0, estimated=usd, at_end=Interval(low=usd, expected=usd, high=usd))
    phases = {"startup": startup, "steps": 3600 * hours - startup}
    rest, whole = rest_and_whole(
        usage_of(sku), price_table(), projection, {"phases": phases, "tier": "dedicated"}, JobView()
    )
    found = savings(rest, whole, settled(windows(events)), events, TRAINING, TABLE, TODAY)
    return {item.name: usd - item.saved_usd for item in found}


def in_the_advice(sku: str, events: list[dict[str, Any]], hours: float = HOURS) -> dict[str, float]:
    """Setting → dollars, of a run that took as long and used little of its nodes."""
    looked_at = ResourceOptimizer(
        events, usage_of(sku, hours), price=price_of(sku), tier="dedicated", training=TRAINING, prices=TABLE.values(),
        today=TODAY,
    )  # fmt: skip
    return {item.setting.split(" = ")[0]: looked_at.usd - item.saved_usd for item in looked_at.recommendations()}


TRAINING = {"gradient_accumulation_steps": 2, "batch_size_per_gpu": 128, "world_size": 3}
TABLE = {sku: price_of(sku) for sku in (V100, T4)}
RUN = Simulation(windows=40, noise=0.0, outliers=0.0, computing=0.02, latency=0.02)
GPU = {"memory_used_bytes": 4 * GIB, "memory_total_bytes": 16 * GIB}
LOOKS = [event("node", node, 1, node_id=node, gpu_utilization=30.0, gpus=[GPU]) for node in (10, 11, 12)]


@pytest.mark.parametrize("events", [LOOKS, [*RUN.events(), *LOOKS]], ids=["not timed", "timed"])
def test_spot_costs_the_same_in_plan_refusal_alert_and_advice(
    events: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    by_hand = NODES * HOURS * price_of(A100).usd_per_hour("spot")
    assert by_hand == pytest.approx(13.333, abs=1e-3)
    assert in_the_plan(price_of(A100), "spot") == pytest.approx(by_hand)
    assert in_the_refusal(price_of(A100), "spot") == dollars(by_hand)
    assert in_the_alert(A100, events, startup=STARTUP)["spot"] == pytest.approx(by_hand)
    assert in_the_advice(A100, events)["DTRAIN_TIER"] == pytest.approx(by_hand)


def test_another_size_fewer_nodes_and_a_larger_batch_cost_the_same_wherever_they_are_told():
    """An hour of steps and nothing else, on three nodes."""
    events = [*RUN.events(), *LOOKS]
    step = seconds_of(events)
    alert, advice = in_the_alert(V100, events, hours=step / 3600), in_the_advice(V100, events, hours=step / 3600)
    world = worlds(settled(windows(events)))[0]
    usd = NODES * step / 3600 * price_of(V100).usd_per_hour("dedicated")
    base = BaseRun(
        price=price_of(V100), tier="dedicated", node_count=NODES, seconds=step, usd=usd, step_seconds=step
    )  # fmt: skip
    rows = build_options(base, world, events, TRAINING, TABLE.values(), TODAY)
    settings = {
        "fewer nodes": "DTRAIN_NODES", "other SKU": "DTRAIN_GPU_TYPE", "larger batch": "training.batch_size_per_gpu"
    }  # fmt: skip
    for kind, setting in settings.items():
        row = best_of(rows, kind)
        assert row
        assert alert[kind] == pytest.approx(row.usd), kind
        assert advice[setting] == pytest.approx(row.usd), kind
        if row.name != "larger batch":
            value = row.setting.split(",")[0].rpartition(" ")[2]
            sku, count = (value, NODES) if kind == "other SKU" else (V100, int(value))
            alone, hours = replace(price_of(sku), speed=1.0), row.seconds / 3600
            assert in_the_plan(alone, "dedicated", count, hours) == pytest.approx(row.usd)
            assert in_the_refusal(alone, "dedicated", count, hours) == dollars(row.usd)


def seconds_of(events: list[dict[str, Any]]) -> float:
    from dtrain_dagster.monitoring.windows import seconds_of as seconds

    return seconds(windows(events))


def test_what_cannot_be_had_is_no_row():
    base = BaseRun(price=price_of(V100), tier="spot", node_count=2, seconds=3600.0, usd=1.0)
    rows = build_options(base, [], [], {"precision": "fp32"}, price_table().values(), date(2026, 3, 1))
    assert {item.name for item in rows} == {"other SKU"}, "it is on Spot already, and no step was timed"
    retired = {price.sku for price in price_table().values() if (price.retired_on or "9") <= "2026-03-01"}
    assert retired
    assert not {item.setting.rpartition(" ")[2] for item in rows} & retired


def test_starting_again_is_paid_where_nodes_change_and_only_there():
    usd = 2 * 10 * price_of(V100).usd_per_hour("dedicated")
    base = BaseRun(
        price=price_of(V100), tier="dedicated", node_count=2, seconds=36000.0, usd=usd,
        step_seconds=36000.0,
    )  # fmt: skip
    again, events = replace(base, restart_seconds=900.0), RUN.events()
    world = worlds(settled(windows(events)))[0]
    for kind, more in (("spot", 900.0), ("larger batch", 0.0)):
        tables = (build_options(item, world, LOOKS, TRAINING, [], TODAY) for item in (base, again))
        first, second = (best_of(table, kind) for table in tables)
        assert first
        assert second
        assert second.lost_seconds - first.lost_seconds == pytest.approx(more)

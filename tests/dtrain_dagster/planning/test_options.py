"""One change has one dollar figure: in the plan's table, in the alert and in the advice after a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from dtrain_dagster.costs.estimate import Interval, estimate_cost
from dtrain_dagster.costs.prices import price_of, price_table
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.monitoring.windows import seconds_of, settled, windows, worlds
from dtrain_dagster.planning.optimizer import ResourceOptimizer, rest_of, savings
from dtrain_dagster.planning.options import BaseRun, best_of, build_options
from dtrain_dagster.planning.projection import Projection
from tests.dtrain_dagster.simulated_timing import Simulation
from trainer.rundir import event

V100, T4 = "Standard_NC6s_v3", "Standard_NC4as_T4_v3"
NODES, TODAY = 3, date(2025, 9, 1)
GIB = 2**30
TRAINING = {"gradient_accumulation_steps": 2, "batch_size_per_gpu": 128, "world_size": 3}
TABLE = {sku: price_of(sku) for sku in (V100, T4)}
RUN = Simulation(windows=40, noise=0.0, outliers=0.0, computing=0.02, latency=0.02)
GPU = {"memory_used_bytes": 4 * GIB, "memory_total_bytes": 16 * GIB}
LOOKS = [event("node", node, 1, node_id=node, gpu_utilization=30.0, gpus=[GPU]) for node in (10, 11, 12)]


@pytest.mark.parametrize("events", [LOOKS, [*RUN.events(), *LOOKS]], ids=["not timed", "timed"])
def test_a_change_costs_the_same_in_plan_alert_and_advice(events: list[dict[str, Any]]):
    """A run of steps and nothing else, on three nodes, of which little is used."""
    seconds = seconds_of(windows(events)) or 3600.0
    usage = [NodeUsage(node_id=node, sku=V100, started_at=0.0, ended_at=seconds) for node in (10, 11, 12)]
    looked_at = ResourceOptimizer(
        events, usage, price=price_of(V100), tier="dedicated", training=TRAINING, prices=TABLE.values(), today=TODAY
    )
    usd = looked_at.usd
    projection = Projection(so_far=0.0, estimated=usd, at_end=Interval(low=usd, expected=usd, high=usd))
    rest = rest_of(usage, price_table(), projection, {"tier": "dedicated"}, JobView())
    alert = {item.name: item for item in savings(rest, settled(windows(events)), events, TRAINING, TABLE, TODAY)}
    advice = {item.name: item for item in looked_at.recommendations()}
    is_timed = len(events) > len(LOOKS)
    assert alert.keys() == {"spot", "other SKU", *(["fewer nodes"] if is_timed else [])}
    assert advice.keys() == ({*alert.keys(), "larger batch"} if is_timed else {"spot"})
    for name, change in alert.items():
        assert name not in advice or change.saved_usd == pytest.approx(advice[name].saved_usd), name
        value = change.setting.split(",")[0].rpartition(" ")[2]
        price, tier, count = price_of(V100), "dedicated", NODES
        if name == "spot":
            tier = "spot"
        elif name == "other SKU":
            price = price_of(value)
        else:
            count = int(value)
        took = Interval(low=0.0, expected=change.seconds, high=change.seconds)
        planned = estimate_cost(took, price, tier, count)  # type: ignore[arg-type]
        assert usd - change.saved_usd == pytest.approx(planned.usd.expected), name


def test_what_cannot_be_had_is_no_row():
    base = BaseRun(price=price_of(V100), tier="spot", node_count=2, seconds=3600.0, usd=1.0)
    rows = build_options(base, [], [], {"precision": "fp32"}, price_table().values(), date(2026, 3, 1))
    assert {item.name for item in rows} == {"other SKU"}, "it is on Spot already, and no step was timed"
    retired = {price.sku for price in price_table().values() if (price.retired_on or "9") <= "2026-03-01"}
    assert retired
    assert not {item.setting.rpartition(" ")[2] for item in rows} & retired


def test_starting_again_is_paid_where_nodes_change_and_only_there():
    usd = 2 * 10 * price_of(V100).usd_per_hour("dedicated")
    base = BaseRun(price=price_of(V100), tier="dedicated", node_count=2, seconds=36000.0, usd=usd, step_seconds=36000.0)
    again, world = replace(base, restart_seconds=900.0), worlds(settled(windows(RUN.events())))[0]
    for kind, more in (("spot", 900.0), ("larger batch", 0.0)):
        first, second = (
            best_of(build_options(item, world, LOOKS, TRAINING, [], TODAY), kind) for item in (base, again)
        )
        assert first
        assert second
        assert second.lost_seconds - first.lost_seconds == pytest.approx(more)

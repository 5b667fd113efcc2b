"""Why a training cost other than its plan said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtrain_dagster.costs.estimate import Estimate, Interval, Work
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.verdict import explain_variance, reasons

SKU = "Standard_NC6s_v3"


def test_the_difference_from_the_estimate_is_the_sum_of_its_reasons():
    """Two nodes were planned for 50 s at $3.06; both came as Spot, started slowly, and redid ten steps."""

    def at(kind: str, time: float, generation: int = 1, **fields: Any) -> dict[str, Any]:
        return {"kind": kind, "time": time, "rank": 0, "generation": generation, **fields}

    def window(time: float, step: int, generation: int = 1) -> dict[str, Any]:
        segments = {"forward": [1.0, 1.0]}
        return at("timing", time, generation, step=step, steps=10, seconds=1.0, nodes=[0, 1], segments=segments)

    def formed(time: float, generation: int, step: int) -> dict[str, Any]:
        return at("membership", time, generation, nodes=[0, 1], joined=[0, 1], step=step, seconds=0.0)

    told = [
        formed(24.0, 1, 0), window(34.0, 10), window(44.0, 20), formed(70.0, 2, 10), window(80.0, 20, 2),
        window(90.0, 30, 2), at("phase", 95.0, 2, name="finalise"), at("end", 95.0, 2, status="succeeded"),
    ]  # fmt: skip
    stays = [(0.0, 44.0), (60.0, 95.0)]
    usage = [
        NodeUsage(node_id=node, sku=SKU, started_at=begin, ended_at=end, tier="low_priority")
        for begin, end in stays
        for node in range(2)
    ]
    bill = CostTracker("gpu", usage, "dedicated")
    usd = 2 * 50 / 3600 * 3.06
    span = Interval(low=usd, expected=usd, high=usd)
    plan = TrainingPlan(
        fingerprint="f", job={}, sku=SKU, tier="dedicated", node_count=2, processes_per_node=1,
        work=Work(steps=40, evaluations=1, checkpoints=1), basis="", price_note="",
        estimate=Estimate(seconds=span, usd=span, usd_per_node_hour=3.06, node_count=2),
    )  # fmt: skip
    for phases in ({}, {"startup": 8.0, "finish": 4.0}):
        found = reasons(
            replace(plan, phases=phases, learned_factor=1.25), bill.nodes, ledger(bill.nodes, told), steps=30
        )
        assert sum(item.usd for item in found) == pytest.approx(bill.total_usd - usd)
        assert [abs(item.usd) for item in found] == sorted([abs(item.usd) for item in found], reverse=True)
    said = explain_variance(found, bill.total_usd, usd)
    assert said.startswith(
        "$0.0675 (79%) below the estimate: the price per node-hour was $0.3978 (Standard_NC6s_v3 (spot)"
    )
    assert "20 s of nodes were lost to failures" in said
    assert "30 steps were trained, instead of the planned 40" in said
    assert "start-up took 24.0 s longer than expected, on each node" in said

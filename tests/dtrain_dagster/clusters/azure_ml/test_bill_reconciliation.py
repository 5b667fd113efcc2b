"""Our figures against exports in the shapes that Azure gives, and why a training cost what it did."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.bill_matching import marks_of
from dtrain_dagster.clusters.azure_ml.bill_reconciliation import reconcile
from dtrain_dagster.clusters.azure_ml.bill_rows import UsageError, read_usage
from dtrain_dagster.costs.estimate import Estimate, Work
from dtrain_dagster.costs.interval import Interval
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.verdict import explain_variance, reasons

MIDNIGHT = 1792886400.0 - 1792886400.0 % 86400
"""Of 2026-10-25, UTC."""
SKU = "Standard_NC6s_v3"
COMPUTE = (
    "/subscriptions/0/resourceGroups/rg/providers/Microsoft.MachineLearningServices/workspaces/w/computes/dtrain-nc6"
)
LAUNCH = {
    "cluster_name": "gpu",
    "job_name": "train-1-l2",
    "compute": "dtrain-nc6",
    "history": [{"job_name": "train-1-l1", "compute": "old"}],
}
MARKS = marks_of("train-1", LAUNCH)
INFO = json.dumps({"ServiceType": SKU})


def tracker() -> CostTracker:
    """Two nodes, each half an hour before and a quarter after midnight."""
    stays = [NodeUsage(node_id=node, sku=SKU, started_at=MIDNIGHT - 1800, ended_at=MIDNIGHT + 900) for node in range(2)]
    return CostTracker("gpu", stays, "dedicated")


def csv_text(rows: list[dict[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def row(date: str, cost: Any, hours: Any, **more: Any) -> dict[str, Any]:
    """As an Enterprise Agreement's cost details have it, in part."""
    return {
        "SubscriptionId": "0", "Date": date, "ProductName": "", "MeterCategory": "Virtual Machines",
        "MeterName": "NC6s v3", "UnitOfMeasure": "1 Hour", "Quantity": hours, "UnitPrice": 3.06,
        "CostInBillingCurrency": cost, "BillingCurrencyCode": "USD", "ResourceId": COMPUTE, "Tags": "",
        "AdditionalInfo": INFO, **more,
    }  # fmt: skip


def test_each_meter_of_each_day_has_its_difference_and_the_reason():
    rows = [
        row("10/24/2026", "6.12", "2"),  # an hour of each node, though each was there for half of one
        row("10/25/2026", "0.61", "1", MeterName="NC6s v3"),  # twice the time at a fifth of the price
        row("10/25/2026", "0.25", "10", MeterCategory="Storage", MeterName="P10 Disks", UnitOfMeasure="1/Month"),
        row("10/26/2026", "3.06", "1", ResourceId="/workspaces/w", Tags='{"dtrain_cluster": "gpu"}'),
        row("10/25/2026", "9.99", "3", ResourceId="/computes/dtrain-nc6-other", Tags='{"dtrain_cluster": "gpu2"}'),
    ]
    found = reconcile(tracker(), read_usage(csv_text(rows), "usage.csv"), MARKS)
    assert found.ours_usd == Decimal("4.5900")
    assert found.billed_usd == Decimal("6.9800")
    assert sum(line.difference_usd for line in found.rows) == found.billed_usd - found.ours_usd
    first, disks, second = found.rows
    assert (first.day, first.billed_usd, first.ours_usd) == ("2026-10-24", Decimal("6.12"), Decimal("3.06"))
    assert first.why == "2.000 h billed, 1.000 h counted (+$3.0600): rounded up to whole hours"
    assert (disks.ours_usd, disks.difference_usd) == (None, Decimal("0.25"))
    assert "disks" in disks.why
    assert "1.000 h billed, 0.500 h counted (+$1.5300): nodes are also billed while they boot, idle" in second.why
    assert "$0.6100 an hour billed, list price $3.0600 (−$2.4500)" in second.why
    said = "\n".join(found.summary)
    assert "identified only by their compute" in said
    assert "not compared: 1 row(s), $3.06: the same computes, on days on which this job had no node" in said
    assert "not compared: 1 row(s), $9.99: something else" in said
    assert [(line.rows, line.billed_usd) for line in found.uncompared] == [(1, Decimal("9.99")), (1, Decimal("3.06"))]
    json.dumps(found.as_dict())


def test_each_tier_of_a_sku_is_held_against_its_own_meter():
    at = MIDNIGHT + 3600
    first = NodeUsage(node_id=0, sku=SKU, started_at=at, ended_at=at + 3600, tier="low_priority")
    then = NodeUsage(node_id=0, sku=SKU, started_at=at + 3600, ended_at=at + 7200, tier="dedicated")
    both = CostTracker("gpu", [first, then], "dedicated")
    rows = [row("10/25/2026", "3.06", "1"), row("10/25/2026", "0.3978", "1", MeterName="NC6s v3 Spot")]
    found = reconcile(both, read_usage(csv_text(rows), "usage.csv"), MARKS)
    assert [line.why for line in found.rows] == ["the same", "the same"]
    only = reconcile(both, read_usage(csv_text(rows[:1]), "usage.csv"), MARKS)
    assert [(line.meter, line.why[:17]) for line in only.rows][1] == (
        f"{SKU.lower()} (Spot)",
        "not in the export",
    )


def test_the_answer_of_a_query_and_tags_that_name_the_job():
    columns = ["PreTaxCost", "UsageDate", "MeterCategory", "Meter", "ResourceId", "Tags", "UsageQuantity", "Currency"]
    mine, other = '"dtrain_job":"train-1"', '"dtrain_job":"train-10"'
    rows = [
        [3.06, 20261024, "Virtual Machines", "NC6s v3", "", mine, 1.0, "USD"],
        [3.06, 20261024, "Virtual Machines", "NC6s v3", "", other, 1.0, "USD"],
    ]
    answer = {"properties": {"nextLink": None, "columns": [{"name": name} for name in columns], "rows": rows}}
    found = reconcile(tracker(), read_usage(json.dumps(answer), "answer.json"), MARKS)
    assert next((line.day, line.billed_usd, line.why) for line in found.rows) == (
        "2026-10-24",
        Decimal("3.06"),
        "the same",
    )
    assert found.rows[1].why.startswith("not in the export")
    assert found.rows[1].difference_usd == Decimal("-1.53")
    answer["properties"]["nextLink"] = "https://…"
    with pytest.raises(UsageError, match="one page of several"):
        read_usage(json.dumps(answer), "answer.json")


def test_what_cannot_be_used_is_refused_by_name():
    good = row("2026-10-24", "1", "1")
    without = {key: value for key, value in good.items() if key not in ("MeterCategory", "ResourceId", "Tags")}
    with pytest.raises(UsageError, match=r"u\.csv has no column for meter .*resource .*it has Sub.*Export 'Cost and"):
        read_usage(csv_text([without]), "u.csv")
    with pytest.raises(UsageError, match=r"u\.csv, row 2: the currency is EUR.*CostInUsd"):
        read_usage(csv_text([good | {"BillingCurrencyCode": "EUR"}]), "u.csv")
    [euro] = read_usage(csv_text([good | {"BillingCurrencyCode": "EUR", "costInUsd": "1.5"}]), "u.csv")
    assert euro.units / 3.6e18 == pytest.approx(1.5)
    for wrong in ({"Date": "yesterday"}, {"CostInBillingCurrency": "much"}, {"CostInBillingCurrency": "NaN"}):
        with pytest.raises(UsageError, match="row 3"):
            read_usage(csv_text([good, good | wrong]), "u.csv")
    for text in ("", "{}", "[1]", '{"columns": 1'):
        with pytest.raises(UsageError):
            read_usage(text, "u.json")


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
    probe = [formed(10.0, 1, 0), window(20.0, 10), at("end", 25.0, status="succeeded")]
    short = CostTracker(
        "gpu", [NodeUsage(node_id=node, sku=SKU, started_at=0.0, ended_at=25.0) for node in range(2)], "dedicated"
    )
    usd = 2 * 50 / 3600 * 3.06
    span = Interval(low=usd, expected=usd, high=usd)
    plan = TrainingPlan(
        fingerprint="f", job={}, sku=SKU, tier="dedicated", node_count=2, processes_per_node=1,
        work=Work(steps=40, evaluations=1, checkpoints=1), basis="", price_note="",
        estimate=Estimate(seconds=span, usd=span, usd_per_node_hour=3.06, node_count=2),
    )  # fmt: skip
    for before in (None, ledger(short.nodes, probe)):
        found = reasons(plan, bill.nodes, ledger(bill.nodes, told), steps=30, probe=before)
        assert sum(item.usd for item in found) == pytest.approx(bill.total_usd - usd)
        assert [abs(item.usd) for item in found] == sorted([abs(item.usd) for item in found], reverse=True)
    said = explain_variance(found, bill.total_usd, usd)
    assert said.startswith(
        "$0.0675 (79%) below the estimate: the price per node-hour was $0.3978 (Standard_NC6s_v3 (spot)"
    )
    assert "20 s of nodes were lost to failures" in said
    assert "30 steps were trained, instead of the planned 40" in said
    assert "start-up took 24.0 s longer than the probe's, on each node" in said

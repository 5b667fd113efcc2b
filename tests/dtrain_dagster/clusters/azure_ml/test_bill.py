"""Our figures against exports in the shapes that Azure gives, whose a row is, and that no dollar is lost. The bills are
ours: see `bills`."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from bills import ELSEWHERE, GUID, SIZE, WORKSPACE, bill, fact
from hypothesis import given
from hypothesis import strategies as st

from dtrain_dagster.clusters.azure_ml.bill import (
    Marks,
    Reconciliation,
    UsageError,
    fields_of,
    read_usage,
    reconcile,
)
from dtrain_dagster.costs.money import USD
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage

NOON = datetime(2026, 10, 25, 12, tzinfo=UTC).timestamp()
LAUNCH = {
    "job_name": "train-1-l2",
    "compute": "dtrain-nc6",
    "history": [{"job_name": "train-1-l1", "compute": "dtrain-old"}],
}
MARKS = Marks("train-1", LAUNCH, WORKSPACE)
SCHEMAS = ("ea", "ea_actual", "mca", "focus")
STORAGE = {"meter": "P10 LRS Disk", "category": "Storage", "unit": "1/Month", "size": ""}
NO_NODE = "the same computes, on days on which this job had no node"


def compared(facts: list[dict[str, Any]], *stays: tuple[float, float, str], schema: str = "mca") -> Reconciliation:
    """``stays``: of one node each: hours from and to noon of 2026-10-25, and the tier; by default an hour of one."""
    usage = [
        NodeUsage(node_id=node, sku=SIZE, started_at=NOON + 3600 * a, ended_at=NOON + 3600 * b, tier=tier)
        for node, (a, b, tier) in enumerate(stays or [(0, 1, "dedicated")])
    ]
    rows = read_usage(bill(schema, facts).encode(), "b")
    return reconcile(CostTracker("gpu", usage, "dedicated"), rows, MARKS)


def dollars(found: Reconciliation) -> Decimal:
    return found.billed_usd + sum((item["billed_usd"] for item in found.uncompared), Decimal(0))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_compute_is_known_by_its_pool_and_its_meters_are_told_apart(schema: str) -> None:
    """The workspace is the resource of each row. Machine, disk and surcharge of one compute, Spot and dedicated; and
    beside them another compute, another workspace's compute of the same name, and the workspace."""
    facts = [
        fact(),
        fact(meter="NC6s v3 Spot", cost=0.3978),
        fact(cost=0.25, hours=0.03, **STORAGE),
        fact(cost=0.04, meter="vCPU Surcharge", category="Azure Machine Learning"),
        fact(cost=7.0, pool=f"dtrain-nc6-2_{GUID}"),
        fact(cost=8.0, resource=ELSEWHERE),
        fact(cost=9.0, pool="", **STORAGE),
        fact("2026-10-20", cost=4.0),
    ]
    found = compared(facts, (0, 1, "dedicated"), (0, 1, "low_priority"), schema=schema)
    lines = {line.meter: (line.billed_usd, line.ours_usd, line.why) for line in found.rows}
    assert lines["Virtual Machines: NC6s v3"] == (Decimal("3.06"), Decimal("3.06"), "the same")
    assert lines["Virtual Machines: NC6s v3 Spot"] == (Decimal("0.3978"), Decimal("0.3978"), "the same")
    ours = {meter.split(":")[0] for meter, (_, ours, _) in lines.items() if ours is None}
    assert ours == {"Azure Machine Learning", "Storage"}
    assert {item["what"]: (item["rows"], item["billed_usd"]) for item in found.uncompared} == {
        "the workspace, without a compute: Storage": (1, Decimal("9")),
        "something else": (1, Decimal("8")),
        "compute dtrain-nc6-2": (1, Decimal("7")),
        NO_NODE: (1, Decimal("4")),
    }
    assert dollars(found) == sum(Decimal(str(row["cost"])) for row in facts)
    assert all(any(item["what"] in line for line in found.summary) for item in found.uncompared)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (fact(), ""),
        (fact(pool=f"DTRAIN-NC6_{GUID}"), ""),
        (fact(pool="dtrain-nc6", pool_key="ComputeTargetName"), ""),
        (fact(pool=f"dtrain-old_{GUID}"), ""),  # of an earlier launch
        (fact(resource=WORKSPACE.upper()), ""),
        (fact(pool=f"dtrain-nc6-2_{GUID}"), "compute dtrain-nc6-2"),
        (fact(resource=ELSEWHERE), "something else"),
        (fact(resource=WORKSPACE.replace("ml-rg", "other-rg")), "something else"),
        (fact(resource="/subscriptions/0/resourceGroups/b/providers/Microsoft.Batch/accounts/a"), "something else"),
        (fact(pool=""), "the workspace, without a compute: Virtual Machines"),
        (fact(pool="", resource=ELSEWHERE, tags='"dtrain_job": "train-1"'), ""),
        (fact(pool="", tags='"dtrain_job": "train-10"'), "the workspace, without a compute: Virtual Machines"),
    ],
)
def test_whose_a_row_is(row: dict[str, Any], why: str) -> None:
    for schema in ("ea", "mca", "focus"):
        [usage] = read_usage(bill(schema, [row]).encode(), "b")
        assert MARKS.why_not(usage) == why, schema


def test_where_no_workspace_is_set_the_computes_of_any_count() -> None:
    [usage] = read_usage(bill("mca", [fact(resource=ELSEWHERE)]).encode(), "b")
    assert Marks("train-1", LAUNCH).why_not(usage) == ""


def test_additional_information_has_braces_or_not() -> None:
    assert fields_of('"a": "1","B": "2"') == {"a": "1", "b": "2"}
    assert fields_of('{"x_PoolName": "p", "VMName": null}') == {"poolname": "p"}
    assert fields_of("") == fields_of("no json") == {}


@pytest.mark.parametrize(
    ("facts", "stays", "whys"),
    [
        ([fact(cost=3.06, hours=1)], [(0, 0.5, "dedicated")], ["hours are rounded up"]),
        ([fact(cost=4.59, hours=1.5)], [(0, 1.25, "dedicated")], ["1.250 h counted: hours are rounded up, and"]),
        ([fact(cost=1.53, hours=0.5)], [(0, 1, "dedicated")], ["not all of it is in the export yet"]),
        ([fact(cost=0.61)], [(0, 1, "dedicated")], ["$0.6100 an hour billed, list price $3.0600: a discount"]),
        ([fact()], [(0, 1, "dedicated"), (0, 1, "low_priority")], ["the same", "not in the export"]),
        ([fact()], [(11.5, 12.5, "dedicated")], ["0.500 h counted", "not in the export"]),  # over midnight
    ],
)
def test_each_difference_has_its_reason(
    facts: list[dict[str, Any]], stays: list[tuple[float, float, str]], whys: list[str]
) -> None:
    found = compared(facts, *stays)
    assert [why in line.why for line, why in zip(found.rows, whys, strict=True)] == [True] * len(whys)
    assert sum(line.difference_usd for line in found.rows) == found.billed_usd - found.ours_usd


def test_the_machine_is_the_node_time_and_not_the_meter_of_azure_ml_beside_it() -> None:
    found = compared([fact(cost=0.0, category="Azure Machine Learning"), fact()])
    assert [(line.meter.split(":")[0], line.ours_usd) for line in found.rows] == [
        ("Azure Machine Learning", None),
        ("Virtual Machines", Decimal("3.0600")),
    ]


def test_a_meter_of_another_tier_is_not_compared_with_the_nodes() -> None:
    counted, missing = compared([fact()], (0, 1, "low_priority")).rows
    assert (counted.ours_usd, counted.why.split(":")[0]) == (None, "not node-time of this job's SKU and tier")
    assert missing.why.startswith("not in the export")


def test_focus_without_the_extensions_of_microsoft_and_compressed_is_read() -> None:
    details = json.dumps({"x_PoolName": f"dtrain-nc6_{GUID}", "x_ServiceType": SIZE}).replace('"', '""')
    header = "BilledCost,BillingCurrency,ChargePeriodStart,ConsumedQuantity,ConsumedUnit,ResourceId,ServiceName"
    line = f"3.06,USD,2026-10-25T00:00:00Z,1,Hours,{WORKSPACE.lower()},Virtual Machines"
    text = f'{header},SkuMeter,SkuPriceDetails\n{line},NC6s v3,"{details}"\n'.encode()
    for data in (text, gzip.compress(text)):
        [row] = read_usage(data, "b")
        assert (row.day, row.meter, row.name, row.hours) == (date(2026, 10, 25), "Virtual Machines", "NC6s v3", 1.0)
        assert (MARKS.why_not(row), row.size) == ("", SIZE.lower())
    with pytest.raises(UsageError, match=r"cannot be decompressed.*download it again"):
        read_usage(gzip.compress(text)[:-9], "b.csv.gz")


@pytest.mark.parametrize(
    ("row", "usd"),
    [
        (fact(cost=2.8, currency="EUR", usd=3.06), 3.06),
        (fact(cost=-0.5), -0.5),  # a correction
        (fact(currency="EUR") | {"usd": ""}, r"row 2: the currency is EUR.*CostInUsd.*x_BilledCostInUsd"),
        (fact("no-such-day"), "row 2: time data .* does not match"),
        (fact() | {"cost": "much"}, "row 2"),
        (fact() | {"cost": "NaN"}, "row 2: cannot convert NaN"),
    ],
)
def test_what_a_row_costs_in_dollars(row: dict[str, Any], usd: float | str) -> None:
    data = bill("mca", [row]).encode()
    if isinstance(usd, str):
        with pytest.raises(UsageError, match=usd):
            read_usage(data, "b")
    else:
        assert read_usage(data, "b")[0].units / USD == pytest.approx(usd)


def test_a_file_that_is_no_export_is_refused_by_what_it_lacks() -> None:
    for text in ("", "{}", "Date,Cost,BillingCurrency\n"):
        with pytest.raises(UsageError, match=r"u\.csv has no column for .*resource .*Export 'Cost and usage details'"):
            read_usage(text.encode(), "u.csv")


FACTS = st.builds(
    fact,
    day=st.sampled_from(["2026-10-23", "2026-10-25"]),
    cost=st.integers(-300, 900).map(lambda cents: cents / 100),
    hours=st.sampled_from([0.25, 1.0, 24.0]),
    pool=st.sampled_from(["", f"dtrain-nc6_{GUID}", f"dtrain-nc6-2_{GUID}", "x"]),
    meter=st.sampled_from(["NC6s v3", "NC6s v3 Spot", "NC24ads A100 v4", "P10 LRS Disk", "vCPU Surcharge"]),
    category=st.sampled_from(["Virtual Machines", "Azure Machine Learning", "Storage", ""]),
    resource=st.sampled_from([WORKSPACE, ELSEWHERE, ""]),
)


@given(st.lists(FACTS, max_size=12), st.sampled_from(SCHEMAS))
def test_no_dollar_of_an_export_is_lost(facts: list[dict[str, Any]], schema: str) -> None:
    found = compared([*facts, fact(cost=1.0)], schema=schema)
    total = 1 + sum(Decimal(str(row["cost"])) for row in facts)
    assert dollars(found) == pytest.approx(total, abs=Decimal("0.02"))


def test_rows_without_text_are_no_rows_and_a_column_without_a_name_has_no_meter() -> None:
    header = ",BilledCost,BillingCurrency,ChargePeriodStart,ConsumedQuantity,ConsumedUnit,ResourceId,ServiceName"
    line = f"7,3.06,USD,2026-10-25T00:00:00Z,1,Hours,{WORKSPACE.lower()},Virtual Machines"
    [row] = read_usage(f"\n{header}\n{line}\n,,,,,,,\n".encode(), "b")
    assert (row.meter, row.name) == ("Virtual Machines", "")

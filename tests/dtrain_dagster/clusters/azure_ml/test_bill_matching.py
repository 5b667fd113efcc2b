"""Whose a row of the bill is, in every schema, and that no row is lost. The bills are ours: see `bills`."""

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

from dtrain_dagster.clusters.azure_ml.bill_matching import (
    belonging_of,
    compute_of_pool,
    marks_of,
    workspace_of,
)
from dtrain_dagster.clusters.azure_ml.bill_reconciliation import is_complete, reconcile
from dtrain_dagster.clusters.azure_ml.bill_rows import (
    UsageError,
    decode_export,
    drop_repeats,
    fields_of,
    read_usage,
)
from dtrain_dagster.costs.money import USD
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage

NOON = datetime(2026, 10, 25, 12, tzinfo=UTC).timestamp()
LAUNCH = {
    "cluster_name": "gpu",
    "job_name": "train-1-l2",
    "compute": "dtrain-nc6",
    "studio_url": "https://ml.azure.com/runs/train-1-l2?wsid="
    f"{WORKSPACE.replace('/providers/Microsoft.MachineLearningServices', '').replace('Groups', 'groups')}&tid=t",
    "history": [{"job_name": "train-1-l1", "compute": "dtrain-old", "studio_url": None}],
}
MARKS = marks_of("train-1", LAUNCH)
SCHEMAS = ("ea", "ea_actual", "mca", "focus", "details")
SPOT = {"meter": "NC6s v3 Spot", "cost": 0.3978}


def tracker(*stays: tuple[float, float, str]) -> CostTracker:
    """Stays of one node each: hours from and to noon of 2026-10-25, and the tier."""
    usage = [
        NodeUsage(node_id=node, sku=SIZE, started_at=NOON + 3600 * a, ended_at=NOON + 3600 * b, tier=tier)
        for node, (a, b, tier) in enumerate(stays)
    ]
    return CostTracker("gpu", usage, "dedicated")


def dollars(found: Any) -> Decimal:
    return found.billed_usd + sum((item.billed_usd for item in found.uncompared), Decimal(0))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_compute_is_known_by_its_pool_and_its_meters_are_told_apart(schema):
    """The workspace is the resource of each row. Machine, disk, load balancer and traffic of one compute, Spot
    and dedicated; and beside them another compute, another workspace's compute of the same name, and the workspace."""
    facts = [
        fact(),
        fact(**SPOT),
        fact(cost=0.25, hours=0.03, meter="P10 LRS Disk", category="Storage", unit="1/Month", size=""),
        fact(cost=0.03, meter="Standard Included LB Rules and Outbound Rules", category="Load Balancer", size=""),
        fact(cost=0.02, hours=0.2, meter="Standard Data Transfer Out", category="Bandwidth", unit="1 GB", size=""),
        fact(cost=0.0, meter="vCPU Surcharge", category="Azure Machine Learning"),
        fact(cost=7.0, pool=f"dtrain-nc6-2_{GUID}"),
        fact(cost=8.0, resource=ELSEWHERE),
        fact(cost=9.0, pool="", meter="Standard Operations", category="Storage", size=""),
        fact(cost=5.0, pool="", resource=WORKSPACE.replace("MachineLearningServices", "OperationalInsights")),
        fact("2026-10-20", cost=4.0),
    ]
    found = reconcile(tracker((0, 1, "dedicated"), (0, 1, "low_priority")), read_usage(bill(schema, facts), "b"), MARKS)
    lines = {line.meter: (line.billed_usd, line.ours_usd, line.why) for line in found.rows}
    assert lines["Virtual Machines: NC6s v3"] == (Decimal("3.06"), Decimal("3.06"), "the same")
    assert lines["Virtual Machines: NC6s v3 Spot"] == (Decimal("0.3978"), Decimal("0.3978"), "the same")
    assert [(meter.split(":")[0], ours) for meter, (_, ours, _) in lines.items() if ours is None] == [
        ("Azure Machine Learning", None), ("Bandwidth", None), ("Load Balancer", None), ("Storage", None),
    ]  # fmt: skip
    assert {item.what: (item.rows, item.billed_usd) for item in found.uncompared} == {
        "something else": (2, Decimal("13")),
        "the same workspace, without a compute: Storage": (1, Decimal("9")),
        "compute dtrain-nc6-2 of the same workspace": (1, Decimal("7")),
        "the same computes, on days on which this job had no node": (1, Decimal("4")),
    }
    assert dollars(found) == sum(Decimal(str(row["cost"])) for row in facts)
    assert all(any(item.what in line for line in found.summary) for item in found.uncompared)


def test_a_surcharge_is_not_taken_for_the_node_time_that_it_is_on():
    row = fact(cost=0.04, meter="vCPU Surcharge", category="Azure Machine Learning")
    found = reconcile(tracker((0, 1, "dedicated")), read_usage(bill("mca", [row]), "b"), MARKS)
    assert [(line.billed_usd, line.ours_usd, line.why.split(":")[0]) for line in found.rows] == [
        (Decimal("0.0400"), None, "a surcharge on node-time"),
        (Decimal("0.0000"), Decimal("3.0600"), "not in the export"),
    ]


@pytest.mark.parametrize(
    ("row", "whose"),
    [
        (fact(), "compute"),
        (fact(pool=f"DTRAIN-NC6_{GUID}"), "compute"),
        (fact(pool=f"dtrain-nc6_{GUID.replace('-', '')}"), "compute"),
        (fact(pool="dtrain-nc6", pool_key="ComputeTargetName"), "compute"),
        (fact(pool=f"dtrain-old_{GUID}"), "compute"),  # of an earlier launch
        (fact(pool=f"dtrain-nc6-2_{GUID}"), "other_compute"),
        (fact(pool=f"my-dtrain-nc6_{GUID}"), "other_compute"),
        (fact(resource=ELSEWHERE), "elsewhere"),
        (fact(resource=WORKSPACE.replace("ml-rg", "other-rg")), "elsewhere"),
        (fact(resource=WORKSPACE.replace("3f2504e0", "ffffffff")), "elsewhere"),
        (fact(resource=WORKSPACE.upper()), "compute"),
        (fact(pool="", resource=f"{WORKSPACE}/computes/dtrain-nc6"), "compute"),
        (fact(pool="", resource=f"{WORKSPACE}/onlineEndpoints/quotes"), "workspace"),
        (fact(pool=""), "workspace"),
        (fact(pool="", tags='"dtrain_cluster": "gpu"'), "compute"),
        (fact(pool="", tags='"dtrain_cluster": "gpu2"'), "workspace"),
        (fact(pool=f"dtrain-nc6-2_{GUID}", tags='"dtrain_cluster": "gpu"'), "other_compute"),
        (fact(resource=ELSEWHERE, tags='"dtrain_cluster": "gpu"'), "elsewhere"),
        (fact(tags='"dtrain_job": "train-1"'), "job"),
        (fact(tags='"dtrain_job": "train-10"'), "compute"),
        (fact(resource="/subscriptions/0/resourceGroups/b/providers/Microsoft.Batch/batchAccounts/mine"), "elsewhere"),
    ],
)  # fmt: skip
def test_whose_a_row_is(row, whose):
    for schema in ("ea", "mca", "focus"):
        [usage] = read_usage(bill(schema, [row]), "b")
        assert belonging_of(usage, MARKS) == whose, schema


def test_without_a_workspace_the_computes_of_all_are_taken_and_it_is_said():
    marks = marks_of("train-1", {**LAUNCH, "studio_url": None})
    assert marks.workspace is None
    assert marks_of("train-1", {**LAUNCH, "studio_url": None}, WORKSPACE).workspace == MARKS.workspace
    assert marks_of("train-1", LAUNCH, ELSEWHERE).workspace == MARKS.workspace  # where it ran counts
    facts = [fact(), fact(resource=ELSEWHERE), fact(pool=f"dtrain-nc6-2_{GUID}")]
    found = reconcile(tracker((0, 1, "dedicated")), read_usage(bill("mca", facts), "b"), marks)
    assert found.billed_usd == Decimal("6.12")
    assert "2 workspaces have a compute of this name" in "\n".join(found.summary)


def test_a_query_that_names_the_workspace_only_is_not_compared_and_the_remedy_is_said():
    columns = ["PreTaxCost", "UsageDate", "MeterCategory", "Meter", "ResourceId", "Currency"]
    rows = [[3.06, 20261025, "Virtual Machines", "NC6s v3", WORKSPACE.lower(), "USD"]]
    answer = {"properties": {"nextLink": None, "columns": [{"name": name} for name in columns], "rows": rows}}
    found = reconcile(tracker((0, 1, "dedicated")), read_usage(json.dumps(answer), "q"), MARKS)
    assert found.billed_usd == 0
    [item] = found.uncompared
    assert item.billed_usd == Decimal("3.06")
    assert "without a compute: Virtual Machines (no AdditionalInfo, which names it: export cost details" in item.what


def test_names_of_pools_workspaces_and_fields():
    assert compute_of_pool(f"gpu-1_{GUID}") == "gpu-1"
    assert compute_of_pool("gpu-1") == "gpu-1"
    assert compute_of_pool("gpu_large") == "gpu_large"
    assert workspace_of(WORKSPACE) == (WORKSPACE.split("/")[2], "ml-rg", "train-ws")
    assert workspace_of("https://ml.azure.com/?wsid=/subscriptions/s/resourcegroups/r/workspaces/W&tid=t") == (
        "s", "r", "w",
    )  # fmt: skip
    assert workspace_of(WORKSPACE.replace("MachineLearningServices", "OperationalInsights")) is None
    assert fields_of('"a": "1","B": "2"') == {"a": "1", "b": "2"}
    assert fields_of('{"x_PoolName": "p", "VMName": null}') == {"poolname": "p"}
    assert fields_of("") == fields_of("[1]") == fields_of("no json") == {}


@pytest.mark.parametrize(
    ("days", "kept", "dropped", "doubtful"),
    [
        ({25: "abc"}, 3, 0, 0),
        ({25: "abcabc"}, 3, 3, 0),  # the whole day twice: a re-run
        ({25: "abcabcabc"}, 3, 6, 0),
        ({25: "abcab"}, 5, 0, 2),  # not the whole day
        ({25: "aabaab"}, 3, 3, 1),  # two nodes with equal hours, and the day twice
        ({25: "aa"}, 2, 0, 1),  # two nodes, or a re-run: nobody knows
        ({24: "abab", 25: "aa"}, 3, 3, 0),  # it was a re-run, by the other day
        ({24: "ab", 25: "cdcd"}, 4, 2, 0),  # the second run was of one day
        ({}, 0, 0, 0),
    ],
)
def test_a_re_run_of_an_export_is_known_by_whole_days(days, kept, dropped, doubtful):
    facts = [fact(f"2026-10-{day}", cost=ord(name)) for day, names in days.items() for name in names]
    rows, repeats = drop_repeats(read_usage(bill("ea", facts), "b"))
    assert (len(rows), len(repeats.dropped), len(repeats.doubtful)) == (kept, dropped, doubtful)


def test_repeated_rows_are_shown_with_their_dollars():
    once = [fact(), fact(cost=7.0, pool="other_00000000")]
    found = reconcile(tracker((0, 1, "dedicated")), read_usage(bill("focus", once * 2), "b"), MARKS)
    assert found.billed_usd == Decimal("3.06")
    assert {item.what: item.billed_usd for item in found.uncompared} == {
        "repetitions of whole days, as re-runs of an export write them": Decimal("10.06"),
        "compute other of the same workspace": Decimal("7"),
    }
    twice = reconcile(tracker((0, 2, "dedicated")), read_usage(bill("focus", once[:1] * 2), "b"), MARKS)
    assert twice.billed_usd == Decimal("6.12")
    assert "1 row(s) of $3.0600 repeat another one and are counted" in "\n".join(twice.summary)


def test_compressed_exports_are_read_and_parquet_is_refused_by_name():
    text = bill("mca", [fact()])
    for data in (text.encode(), gzip.compress(text.encode())):
        assert len(read_usage(decode_export(data, "b"), "b")) == 1
    with pytest.raises(UsageError, match=r"b\.parquet is a Parquet file: choose CSV"):
        decode_export(b"PAR1....PAR1", "b.parquet")
    with pytest.raises(UsageError, match=r"cannot be decompressed.*download it again"):
        decode_export(gzip.compress(text.encode())[:-9], "b.csv.gz")


def test_focus_without_the_extensions_of_microsoft_is_read():
    """FOCUS 1.2 has SkuMeter and SkuPriceDetails, with an 'x_' before the keys that are the provider's own."""
    details = json.dumps({"x_PoolName": f"dtrain-nc6_{GUID}", "x_ServiceType": SIZE})
    header = (
        "BilledCost,BillingCurrency,ChargePeriodStart,ConsumedQuantity,ConsumedUnit,ResourceId,ServiceName,SkuMeter"
    )
    line = f"3.06,USD,2026-10-25T00:00:00Z,1,Hours,{WORKSPACE.lower()},Virtual Machines,NC6s v3"
    quoted = '"' + details.replace('"', '""') + '"'
    [row] = read_usage(f"{header},SkuPriceDetails\n{line},{quoted}\n", "b")
    assert (row.day, row.meter, row.name, row.hours) == (date(2026, 10, 25), "Virtual Machines", "NC6s v3", 1.0)
    assert (belonging_of(row, MARKS), row.size) == ("compute", SIZE.lower())


@pytest.mark.parametrize(
    ("schema", "row", "usd"),
    [
        ("ea", fact(cost=2.5), 2.5),
        ("mca", fact(cost=2.8, currency="EUR", usd=3.06), 3.06),
        ("focus", fact(cost=2.8, currency="EUR", usd=3.06), 3.06),
        ("mca", fact(cost=-0.5), -0.5),  # a correction
        ("ea", fact(cost=2.8, currency="EUR"), None),  # this schema has no dollars
        ("mca", fact(cost=2.8, currency="EUR") | {"usd": ""}, None),
    ],
)
def test_what_a_row_costs_in_dollars(schema, row, usd):
    if usd is None:
        with pytest.raises(UsageError, match=r"b, row 2: the currency is EUR.*CostInUsd.*x_BilledCostInUsd.*CostUSD"):
            read_usage(bill(schema, [row]), "b")
    else:
        assert read_usage(bill(schema, [row]), "b")[0].units / USD == pytest.approx(usd)


def test_the_price_lists_currency_serves_where_it_is_the_dollar():
    text = bill("mca", [fact(cost=2.8, currency="EUR") | {"usd": ""}])
    head, line = text.splitlines()
    places = {name: place for place, name in enumerate(head.split(","))}
    cells = line.split(",")
    cells[places["pricingCurrency"]], cells[places["costInPricingCurrency"]] = "USD", "3.06"
    assert read_usage(f"{head}\n{','.join(cells)}", "b")[0].units == round(Decimal("3.06") * USD)


@pytest.mark.parametrize(
    ("today", "complete"),
    [("2026-10-25", False), ("2026-10-26", False), ("2026-10-27", False), ("2026-10-28", True), (None, True)],
)
def test_a_day_is_complete_when_azure_has_had_the_time(today, complete):
    assert is_complete(date(2026, 10, 25), date.fromisoformat(today) if today else None) == complete


def test_a_day_that_is_not_complete_is_said_with_its_dollars():
    stays = [(-48.0, -47.0, "dedicated"), (0.0, 1.0, "dedicated")]
    rows = read_usage(bill("mca", [fact("2026-10-23"), fact(cost=0.5, hours=0.16)]), "b")
    found = reconcile(tracker(*stays), rows, MARKS, date(2026, 10, 26))
    assert [(line.day, line.complete) for line in found.rows] == [("2026-10-23", True), ("2026-10-25", False)]
    assert found.rows[1].why.startswith("this day is not complete yet; 0.160 h billed, 1.000 h counted")
    assert (
        "1 day(s) are not complete yet, with $0.5000 billed and $3.0600 of ours: export again on 2026-10-28 or later"
        in found.summary
    )
    assert json.loads(json.dumps(found.as_dict()))["rows"][1]["complete"] is False


FACTS = st.builds(
    fact,
    day=st.sampled_from(["2026-10-23", "2026-10-24", "2026-10-25"]),
    cost=st.integers(-300, 900).map(lambda cents: cents / 100),
    hours=st.sampled_from([0.25, 1.0, 24.0]),
    pool=st.sampled_from(["", f"dtrain-nc6_{GUID}", f"dtrain-nc6-2_{GUID}", "x"]),
    meter=st.sampled_from(
        ["NC6s v3", "NC6s v3 Low Priority", "NC6s v3 Spot", "NC24ads A100 v4", "P10 LRS Disk", "vCPU Surcharge"]
    ),
    category=st.sampled_from(["Virtual Machines", "Azure Machine Learning", "Storage", "Bandwidth", ""]),
    resource=st.sampled_from([WORKSPACE, ELSEWHERE, "", f"{WORKSPACE}/computes/dtrain-nc6"]),
)


@given(st.lists(FACTS, max_size=12), st.sampled_from(["ea", "mca", "focus"]), st.integers(1, 2))
def test_no_dollar_of_an_export_is_lost(facts, schema, runs):
    """Whatever is in it, and however often it was written: compared and uncompared dollars are those of the file."""
    facts = [*facts, fact(cost=1.0)]
    found = reconcile(
        tracker((0, 1, "dedicated")), read_usage(bill(schema, facts * runs), "b"), MARKS, date(2026, 10, 26)
    )
    total = runs * sum(Decimal(str(row["cost"])) for row in facts)
    assert dollars(found) == pytest.approx(total, abs=Decimal("0.02"))

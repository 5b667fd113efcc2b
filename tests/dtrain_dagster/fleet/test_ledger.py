"""The ledger of a fleet is the sum of its jobs' ledgers, to the microsecond."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain_dagster.costs.ledger import Ledger, ledger
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.fleet.view import LedgerError, add_ledgers


def bill(*spans: tuple[float, float]) -> tuple[CostTracker, Ledger]:
    usage = [
        NodeUsage(node_id=node, sku="Standard_NC6s_v3", started_at=began, ended_at=ended)
        for node, (began, ended) in enumerate(spans)
    ]
    tracker = CostTracker("", usage, "dedicated")
    return tracker, ledger(tracker.nodes, [])


def test_every_node_second_of_every_job_is_in_it():
    bills = {"a": bill((0, 10.000001), (0, 5)), "b": bill((3, 4.5))}
    found = add_ledgers(bills)
    assert found.whole.microseconds == 16_500_001
    assert found.whole.units == sum(tracker.total_units for tracker, _ in bills.values())
    assert sum(row.units for row in found.whole.causes().values()) == found.whole.units
    assert {job_id: row.microseconds for job_id, row in found.jobs.items()} == {"a": 15_000_001, "b": 1_500_000}


def test_a_ledger_that_lacks_a_microsecond_is_refused():
    tracker, whole = bill((0, 10))
    first, *others = whole.entries
    short = replace(whole, entries=(replace(first, microseconds=first.microseconds - 1), *others))
    with pytest.raises(LedgerError, match="job a: its ledger has 9999999 microseconds of nodes, paid were 10000000"):
        add_ledgers({"a": (tracker, short)})

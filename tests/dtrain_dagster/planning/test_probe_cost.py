"""What a probe will cost, what it may cost, and who pays for it."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain_dagster.assets.training import with_probes
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.plan import PLAN, ProbeCharge
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.planning.build_plan import Limits, explain_excess
from dtrain_dagster.planning.evidence import (
    left_node_seconds,
    payer_of,
    take_charges,
    unpaid_charges,
)
from tests.dtrain_dagster.assets.test_plan_limits import plan
from trainer.rundir import RunDir

V100 = price_of("Standard_NC6s_v3")
SECOND = V100.usd_per_hour("dedicated") / 3600
"""Dollars of a node-second."""


def charge(job_id: str = "probe-a-2n", began: float = 1000.0) -> ProbeCharge:
    stays = [NodeUsage(node_id=node, sku=V100.sku, started_at=began, ended_at=began + 30) for node in (0, 1)]
    return ProbeCharge(job_id=job_id, usage=tuple(stays))


def test_a_probe_counts_against_the_limits_of_its_training():
    estimate = plan().estimate
    usd = estimate.usd.expected
    assert explain_excess(estimate, Limits(budget_usd=usd + 0.1, spent_usd=0.09)) is None
    assert "after $0.1100 for its probe" in str(explain_excess(estimate, Limits(budget_usd=usd + 0.1, spent_usd=0.11)))
    took = Limits(deadline_hours=1.01, spent_seconds=40.0)
    assert "after 40 s for its probe" in str(explain_excess(estimate, took))
    assert explain_excess(estimate, replace(took, spent_seconds=30.0)) is None


@pytest.mark.parametrize(
    ("limits", "stop_at", "charges", "left"),
    [
        (Limits(), 0.0, [charge()], None),
        (Limits(), 100.0, [], 100.0),
        (Limits(budget_usd=100.0 * SECOND), 200.0, [], 100.0),
        (Limits(budget_usd=200.0 * SECOND), 100.0, [charge()], 40.0),
        (Limits(), 100.0, [charge(), charge("other", 2000.0)], 0.0),
        (Limits(deadline_hours=0.01), 100.0, [], 72.0),  # of two nodes
    ],
)
def test_the_limits_leave_a_probe_what_earlier_ones_have_not_taken(
    limits: Limits, stop_at: float, charges: list[ProbeCharge], left: float | None
):
    """``stop_at``: in node-seconds."""
    found = left_node_seconds(limits, stop_at * SECOND, charges, V100, "dedicated", 2)
    assert found == (None if left is None else pytest.approx(left))


def test_of_trainings_that_rest_on_a_probe_one_pays(tmp_path: Path):
    paid: dict[str, tuple[ProbeCharge, ...]] = {}

    def take(job_id: str) -> None:
        paid[job_id] = take_charges(str(tmp_path), [charge()], job_id)

    threads = [threading.Thread(target=take, args=(f"train-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [payer] = [job_id for job_id, charges in paid.items() if charges]
    assert payer_of(RunDir(f"{tmp_path}/probe-a-2n")) == payer
    assert take_charges(str(tmp_path), [charge()], payer) == (charge(),), "asked again, it is still its own"
    cluster: Any = SimpleNamespace(node_usage=lambda job_id: charge(job_id).usage)
    left = unpaid_charges(cluster, str(tmp_path), ["probe-a-2n", "probe-b-2n"])
    assert left == (charge("probe-b-2n"),), "what is paid does not count against the limits of another plan"


def test_a_job_that_continues_keeps_the_probe_that_it_was_started_with(tmp_path: Path):
    rundir = RunDir(f"{tmp_path}/train-a")
    first = with_probes(replace(plan(), probes=(charge(),)), rundir, str(tmp_path), "train-a")
    assert first.probes == (charge(),)
    rundir.write_json(PLAN, asdict(first))
    again = with_probes(plan(), rundir, str(tmp_path), "train-a")
    assert again.probes == (charge(),), "a plan made later finds it paid"
    more = with_probes(replace(plan(), probes=(charge("probe-b-2n"),)), rundir, str(tmp_path), "train-a")
    assert {item.job_id for item in more.probes} == {"probe-a-2n", "probe-b-2n"}
    assert [item["job_id"] for item in rundir.read_json(PLAN)["probes"]] == ["probe-b-2n", "probe-a-2n"]
    other = with_probes(replace(plan(), probes=(charge(),)), RunDir(f"{tmp_path}/train-b"), str(tmp_path), "train-b")
    assert other.probes == ()


def test_the_bill_has_the_probe_as_a_cause_of_its_own():
    later = NodeUsage(node_id=0, sku=V100.sku, started_at=900_000.0, ended_at=900_060.0)
    tracker = CostTracker("c", [later, *replace(plan(), probes=(charge(),)).probe_usage], "dedicated")
    assert tracker.probe_usd == pytest.approx(60 / 3600 * 3.06)
    assert tracker.training_usd == pytest.approx(60 / 3600 * 3.06)
    assert tracker.total_usd == pytest.approx(tracker.probe_usd + tracker.training_usd)
    assert tracker.wall_seconds == 60.0, "the days between are nobody's time"
    found = ledger(tracker.nodes, [])
    assert found.units == tracker.total_units
    assert found.causes()[CostCause.PROBE].seconds == 60.0

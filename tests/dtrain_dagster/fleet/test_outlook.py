"""What is expected of a fleet as it stands."""

from __future__ import annotations

import pytest

from dtrain_dagster.fleet.grants import Standing
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState
from dtrain_dagster.fleet.outlook import expect
from dtrain_dagster.fleet.scheduling import FleetFacts


def test_what_is_expected_of_a_fleet_is_told_from_where_it_stands():
    limits = FleetLimits(budget_usd=1.3, nodes=1, usd_per_node_hour=3.6, margin_seconds=10.0, slice_seconds=60.0)
    now, job = 5000.0, {"node_seconds": 400.0, "startup_seconds": 20.0}
    runs = Standing(
        job=FleetJob(job_id="runs", **job), number=0, state=FleetState.RUNNING, nodes=1,
        paid_units=limits.units_of(300), grant_units=limits.units_of(350), left_node_seconds=250.0, left_spread=0.1,
        launched_at=4700.0, is_training=True,
    )  # fmt: skip
    jobs = (runs, *(Standing(job=FleetJob(job_id=name, **job), number=1) for name in ("next", "poor")))
    found = expect(FleetFacts(limits=limits, jobs=jobs, settled_units=limits.units_of(50)), now)
    assert (found["runs"].state, found["runs"].begins_at, found["runs"].ends_at) == ("succeeded", None, now + 250)
    assert (found["next"].state, found["next"].begins_at) == ("succeeded", pytest.approx(now + 250))
    assert found["next"].ends_at == pytest.approx(now + 250 + 420)
    assert (found["poor"].state, found["poor"].begins_at) == ("ended", None)
    assert "$0.2800 of the budget is left" in found["poor"].reason
    assert expect(FleetFacts(limits=limits, jobs=()), now) == {}


def test_a_job_that_waits_beyond_its_deadline_and_one_that_is_too_wide_are_not_expected_to_end():
    limits = FleetLimits(budget_usd=100.0, nodes=2, usd_per_node_hour=3.6)
    job = {"node_seconds": 400.0, "startup_seconds": 20.0}
    first = Standing(job=FleetJob(job_id="first", priority=1, least_nodes=2, most_nodes=2, **job), number=0)
    late = Standing(job=FleetJob(job_id="late", deadline=600.0, **job), number=1)
    wide = Standing(job=FleetJob(job_id="wide", least_nodes=3, most_nodes=3, **job), number=2)
    found = expect(FleetFacts(limits=limits, jobs=(first, late, wide)), 0.0)
    assert found["first"].state == "succeeded"
    assert found["late"].reason.startswith("not begun: it would take 7 min 00 s on 1 node, and its deadline is in")
    assert found["wide"].reason == "it needs 3 nodes"

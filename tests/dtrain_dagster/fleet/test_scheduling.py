"""What is decided for a fleet, without a process: invariants over random states, and the rules one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain_dagster.costs.money import USD
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.scheduling import (
    LEAST_WORK_SECONDS,
    UNFORESEEN_SHARE,
    Decision,
    Look,
    decide,
    node_limit,
)

LIMITS = FleetLimits(budget_usd=10.0, nodes=4, usd_per_node_hour=3.6, margin_seconds=10.0)
CENT = USD // 100
"""At that price: ten node-seconds."""


def waiting(job_id: str, number: int = 0, **fields: object) -> Standing:
    job = FleetJob(**{"job_id": job_id, "node_seconds": 600.0, "startup_seconds": 10.0, **fields})  # type: ignore[arg-type]
    return Standing(job=job, number=number)


def running(job_id: str, nodes: int = 1, number: int = 0, grant: int = 100 * CENT, **fields: object) -> Standing:
    return replace(
        waiting(job_id, number, nodes=nodes, **fields), state=FleetState.RUNNING, nodes=nodes,
        grant_units=grant, launched_at=0.0, is_training=True, left_node_seconds=600.0,
    )  # fmt: skip


def decided(*jobs: Standing, limits: FleetLimits = LIMITS, now: float = 0.0) -> tuple[Decision, ...]:
    return decide(limits, jobs, now)


def starts(decisions: tuple[Decision, ...]) -> set[str]:
    return {item.job_id for item in decisions if item.kind == "start"}


def reason(*jobs: Standing, now: float = 0.0) -> str:
    """Why the only job that is ended is."""
    [end] = decided(*jobs, now=now)
    assert end.kind == "end"
    return end.reason


@st.composite
def standings(draw: st.DrawFn, limits: FleetLimits) -> list[Standing]:
    """Any state that a fleet can be in: nodes and grants within the limits, bills within the grants."""
    free_nodes, free_units = limits.nodes, limits.budget_units
    found = []
    for number in range(draw(st.integers(0, 8))):
        job = FleetJob(
            job_id=f"j{number}",
            priority=draw(st.integers(0, 3)),
            nodes=draw(st.integers(1, limits.nodes + 1)),
            node_seconds=draw(st.floats(1, 1e5)),
            spread=draw(st.floats(0, 2)),
            startup_seconds=draw(st.floats(0, 100)),
            deadline=draw(st.none() | st.floats(1, 1e5)),
        )
        state = draw(st.sampled_from([item for item in FleetState if not item.is_final]))
        paid = draw(st.integers(0, free_units // 4))
        if state.has_nodes and job.nodes <= free_nodes:
            grant, nodes = draw(st.integers(paid, max(paid, free_units // 2))), job.nodes
        else:
            state, grant, nodes = FleetState.PAUSED if paid else FleetState.WAITING, paid, 0
        free_nodes, free_units = free_nodes - nodes, free_units - grant
        found.append(
            Standing(
                job=job, number=number, state=state, nodes=nodes, paid_units=paid, grant_units=grant,
                launched_at=0.0 if paid or nodes else None, left_node_seconds=draw(st.none() | st.floats(0, 1e5)),
                not_before=draw(st.sampled_from([0.0, 1e6])), is_training=bool(nodes) and draw(st.booleans()),
            )
        )  # fmt: skip
    return found


def granted(jobs: Iterable[Standing]) -> int:
    """The sum of what jobs were promised; what those cost that are over."""
    return sum(item.paid_units if item.state.is_final else item.grant_units for item in jobs)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_no_decision_promises_more_dollars_or_nodes_than_there_are_or_forgets_a_job(data: st.DataObject):
    limits = FleetLimits(
        budget_usd=data.draw(st.floats(0.01, 50)), nodes=data.draw(st.integers(1, 6)), usd_per_node_hour=3.06,
        margin_seconds=data.draw(st.floats(1, 60)),
    )  # fmt: skip
    jobs = data.draw(standings(limits))
    more, now = data.draw(st.booleans()), data.draw(st.floats(0, 1e5))
    assert granted(jobs) <= limits.budget_units
    decisions = decide(limits, jobs, now, more)
    after = {job.job_id: job for job in jobs}
    for item in decisions:
        before = after[item.job_id]
        if item.kind == "start":
            assert before.state in (FleetState.WAITING, FleetState.PAUSED)
            assert before.not_before <= now
            after[item.job_id] = replace(
                before, state=FleetState.RUNNING, nodes=before.job.nodes, grant_units=item.grant_units
            )
        elif item.kind == "raise":
            assert before.state is FleetState.RUNNING
            assert item.grant_units > before.grant_units
            after[item.job_id] = replace(before, grant_units=item.grant_units)
        else:
            assert item.reason
        # at each point between two decisions, since a process may die there
        assert granted(after.values()) <= limits.budget_units
        assert sum(job.nodes for job in after.values()) <= limits.nodes
    told = [item.job_id for item in decisions]
    assert len(told) == len(set(told)), "one answer for each job"
    waits = Look(limits, jobs, now, more).waits
    assert set(waits) == {job.job_id for job in jobs if not job.state.has_nodes} - set(told), "or a reason to wait"
    if not any(job.state.has_nodes for job in jobs) and not more:
        left = {job.job_id for job in jobs} - set(told)
        assert not left or starts(decisions) or any(after[name].not_before > now for name in left), "no fleet hangs"


def test_a_limit_leaves_each_node_its_margin():
    job = replace(running("a", nodes=2, grant=100 * CENT), paid_units=10 * CENT, node_seconds=100.0)
    assert node_limit(job, LIMITS) == 100 + 2 * (450 - 10), "90 cents pay two nodes for 450 s each"


def test_the_higher_priority_comes_first_and_then_the_shorter():
    jobs = [waiting("long"), waiting("short", 1, node_seconds=60.0), waiting("first", 2, priority=1)]
    limits = replace(LIMITS, nodes=2)
    assert starts(decided(*jobs, limits=limits)) == {"first", "short"}


def test_nobody_passes_the_first_that_waits_for_nodes_and_none_that_runs_gives_its_own_up():
    busy = replace(running("busy", nodes=2, grant=500 * CENT), left_node_seconds=2000.0)
    wide = waiting("wide", 1, priority=1, nodes=3, node_seconds=100.0)
    short = waiting("short", 2, node_seconds=50.0)
    assert not decided(busy, wide, short)
    assert starts(decided(busy, replace(wide, job=replace(wide.job, nodes=2)), short)) == {"wide"}


def test_what_cannot_end_in_time_is_not_begun_and_is_told_why():
    late = waiting("late", deadline=500.0)
    assert "not begun: it would take 10 min 10 s on 1 node, and its deadline is in 8 min 20 s" in reason(late)
    runs = running("runs", deadline=500.0)
    assert not decided(runs), "it may still end in time"
    assert "needs at least 8 min 00 s more, and its deadline is in 3 min 20 s" in reason(runs, now=300.0)
    assert reason(running("over", deadline=50.0), now=50.0) == "its deadline has passed"


def test_what_cannot_end_within_the_budget_is_not_begun_and_is_told_why():
    dear = waiting("dear", node_seconds=20_000.0)
    assert "not begun: it would cost $26.02 to its end, and $10.00 of the budget is left" in reason(dear)
    assert starts(decided(dear, waiting("cheap", 1))) == {"cheap"}
    rest = replace(dear, paid_units=100 * CENT, grant_units=100 * CENT, launched_at=0.0, state=FleetState.PAUSED)
    assert "not continued" in reason(rest)


def test_no_job_begins_with_dollars_that_those_before_it_need():
    runs = replace(running("runs", grant=100 * CENT), left_node_seconds=7000.0)
    assert not starts(decided(runs, waiting("b", 1, node_seconds=3000.0))), "7.7 of 10 dollars are needed to its end"
    assert starts(decided(runs, waiting("b", 1, node_seconds=900.0))) == {"b"}


def test_what_nodes_cost_beyond_their_limit_is_promised_to_nobody():
    over = replace(running("over", grant=100 * CENT), state=FleetState.PAUSING, paid_units=400 * CENT)
    two = [waiting(name, number, node_seconds=2500.0) for number, name in enumerate("bc", 1)]
    assert starts(decided(over, *two)) == {"b"}, "6 dollars are left, of which each needs 3.27"


def test_a_job_is_promised_all_dollars_to_its_end_and_more_where_it_takes_longer():
    [start] = decided(waiting("a", node_seconds=5000.0))
    assert start.grant_units == LIMITS.units_of(10 + 10 + 1.3 * 5000), "a margin, a start, and a deviation more"
    longer = replace(running("a", grant=LIMITS.units_of(10 + 540.0)), left_node_seconds=1000.0)
    [more] = decided(longer)
    assert more == Decision(job_id="a", kind="raise", grant_units=LIMITS.units_of(10 + 1100))
    assert not decided(replace(longer, grant_units=LIMITS.units_of(10 + 560.0))), "it has half of what it needs"


def test_a_job_that_is_expected_to_end_is_promised_a_share_of_its_whole_for_what_nobody_foresaw():
    nearly = replace(running("a", grant=LIMITS.units_of(10 + 10.0), node_seconds=500.0), left_node_seconds=0.0)
    assert decided(nearly)[0].grant_units == LIMITS.units_of(10 + UNFORESEEN_SHARE * (10 + 500))
    short = replace(nearly, job=replace(nearly.job, node_seconds=5.0))
    assert decided(short)[0].grant_units == LIMITS.units_of(10 + LEAST_WORK_SECONDS)


def test_dollars_that_are_left_go_to_a_job_that_can_end_with_them_and_no_other():
    first = replace(running("first", grant=500 * CENT, priority=1), paid_units=490 * CENT, left_node_seconds=3000.0)
    last = replace(running("last", number=1, grant=400 * CENT), paid_units=100 * CENT, left_node_seconds=3000.0)
    few = replace(LIMITS, budget_usd=9.5)
    assert not decided(first, last, limits=few), "half a dollar would not bring it to its end"
    half = replace(first, grant_units=700 * CENT)
    new = waiting("new", 1, node_seconds=5.0)
    assert not decided(half, new, limits=replace(LIMITS, budget_usd=8.22)), "what it will need is kept for it"
    hopeless = replace(first, left_node_seconds=9000.0)
    assert starts(decided(hopeless, waiting("new", 1))) == {"new"}, "it comes to its limit"
    enough = replace(first, left_node_seconds=400.0)
    [more] = decided(enough, last, limits=replace(LIMITS, budget_usd=9.32))
    assert more.grant_units == 532 * CENT, "less than a deviation more, and enough by what is expected"


def test_each_job_that_waits_says_for_what():
    def told(*jobs: Standing, limits: FleetLimits = LIMITS, now: float = 0.0) -> dict[str, str]:
        return Look(limits, jobs, now).waits

    wide, after = waiting("wide", 1, nodes=2), waiting("after", 2, node_seconds=700.0)
    assert told(running("all", nodes=3), wide, after) == {
        "wide": "it needs 2 nodes, and 1 is free",
        "after": "nodes are kept for wide, which comes before it",
    }
    assert told(running("all", nodes=4), waiting("one", 1)) == {"one": "no node is free"}
    assert told(running("all", nodes=6), waiting("one", 1)) == {"one": "no node is free"}, "the fleet has fewer by now"
    poor = replace(LIMITS, budget_usd=1.1)
    assert told(running("runs"), waiting("poor", 1, node_seconds=700.0), limits=poor) == {
        "poor": "the rest of the budget is needed by jobs ahead of it"
    }
    assert told(replace(wide, not_before=9.0)) == {"wide": "the cluster had no nodes for it: it is tried again later"}
    assert told(waiting("begins")) == {}

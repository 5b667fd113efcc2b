"""What is decided for a fleet, without a process: invariants over random states, and the rules one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain_dagster.costs.money import USD
from dtrain_dagster.fleet.grants import (
    LEAST_WORK_SECONDS,
    UNFORESEEN_SHARE,
    first_grant,
    next_grant,
    node_limit,
    seconds_ahead,
)
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.scheduling import (
    Decision,
    End,
    FleetFacts,
    Look,
    Pause,
    RaiseGrant,
    Start,
    decide,
)

LIMITS = FleetLimits(budget_usd=10.0, nodes=4, usd_per_node_hour=3.6, margin_seconds=10.0, slice_seconds=600.0)
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


def decided(
    *jobs: Standing, limits: FleetLimits = LIMITS, now: float = 0.0, more: bool = False
) -> tuple[Decision, ...]:
    return decide(FleetFacts(limits=limits, jobs=jobs, more_may_come=more), now)


def starts(decisions: tuple[Decision, ...]) -> set[str]:
    return {item.job_id for item in decisions if isinstance(item, Start)}


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


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_no_decision_promises_more_dollars_or_nodes_than_there_are_or_forgets_a_job(data: st.DataObject):
    limits = FleetLimits(
        budget_usd=data.draw(st.floats(0.01, 50)), nodes=data.draw(st.integers(1, 6)), usd_per_node_hour=3.06,
        margin_seconds=data.draw(st.floats(1, 60)), slice_seconds=data.draw(st.floats(10, 3600)),
    )  # fmt: skip
    jobs = data.draw(standings(limits))
    more, now = data.draw(st.booleans()), data.draw(st.floats(0, 1e5))
    assert granted(jobs) <= limits.budget_units
    decisions = decide(FleetFacts(limits=limits, jobs=tuple(jobs), more_may_come=more), now)
    after = {job.job.job_id: job for job in jobs}
    for item in decisions:
        before = after[item.job_id]
        if isinstance(item, Start):
            assert before.state in (FleetState.WAITING, FleetState.PAUSED)
            assert before.not_before <= now
            after[item.job_id] = replace(
                before, state=FleetState.RUNNING, nodes=before.job.nodes, grant_units=item.grant_units
            )
        elif isinstance(item, RaiseGrant):
            assert before.state is FleetState.RUNNING
            assert item.grant_units > before.grant_units
            after[item.job_id] = replace(before, grant_units=item.grant_units)
        else:
            assert item.reason
            assert before.state is FleetState.RUNNING or isinstance(item, End)
        # at each point between two decisions, since a process may die there
        assert granted(after.values()) <= limits.budget_units
        assert sum(job.nodes for job in after.values()) <= limits.nodes
    told = [item.job_id for item in decisions if not isinstance(item, RaiseGrant)]
    assert len(told) == len(set(told)), "one answer for each job"
    waits = Look(FleetFacts(limits=limits, jobs=tuple(jobs), more_may_come=more), now).waits
    assert set(waits) == {job.job.job_id for job in jobs if not job.state.has_nodes} - set(told), "or a reason to wait"
    if not any(job.state.has_nodes for job in jobs) and not more:
        left = {job.job.job_id for job in jobs} - set(told)
        assert not left or starts(decisions) or any(after[name].not_before > now for name in left), "no fleet hangs"


def test_a_limit_leaves_each_node_its_margin():
    job = running("a", nodes=2, grant=100 * CENT)
    assert seconds_ahead(job, LIMITS) == 500 - 10, "a dollar pays two nodes for 500 s each"
    assert node_limit(replace(job, paid_units=10 * CENT, node_seconds=100.0), LIMITS) == 100 + 2 * (450 - 10)


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
    [end] = decided(late)
    assert isinstance(end, End)
    assert "not begun: it would take 10 min 10 s on 1 node, and its deadline is in 8 min 20 s" in end.reason
    [end] = decided(late, now=100.0)
    assert "its deadline is in 6 min 40 s" in getattr(end, "reason", "")
    runs = running("runs", deadline=500.0)
    assert not decided(runs, now=100.0), "it may still end in time"
    [end] = decided(runs, now=300.0)
    assert "needs at least 4 min 00 s more, and its deadline is in 3 min 20 s" in getattr(end, "reason", "")
    [end] = [item for item in decided(running("over", deadline=50.0), now=50.0) if isinstance(item, End)]
    assert end.reason == "its deadline has passed"


def test_what_cannot_end_within_the_budget_is_not_begun_and_is_told_why():
    dear = waiting("dear", node_seconds=20_000.0)
    [end] = decided(dear)
    assert isinstance(end, End)
    assert "not begun: it would cost $26.02 to its end, and $10.00 of the budget is left" in end.reason
    assert starts(decided(dear, waiting("cheap", 1))) == {"cheap"}
    rest = replace(dear, paid_units=100 * CENT, grant_units=100 * CENT, launched_at=0.0, state=FleetState.PAUSED)
    [end] = decided(rest)
    assert isinstance(end, End)
    assert "not continued" in end.reason


def test_no_job_begins_with_dollars_that_those_before_it_need():
    runs = replace(running("runs", grant=100 * CENT), left_node_seconds=7000.0, left_spread=0.1)
    assert not starts(decided(runs, waiting("b", 1, node_seconds=3000.0))), "7.7 of 10 dollars are needed to its end"
    assert starts(decided(runs, waiting("b", 1, node_seconds=900.0))) == {"b"}


def test_grants_are_slices_and_are_raised_while_there_is_room():
    [start] = decided(waiting("a", node_seconds=5000.0))
    assert isinstance(start, Start)
    assert start.grant_units == LIMITS.units_of(10 + 10 + 600), "a margin, a start and a slice"
    half = running("a", grant=LIMITS.units_of(10 + 290.0))
    [more] = decided(replace(half, left_node_seconds=5000.0))
    assert isinstance(more, RaiseGrant)
    assert more.grant_units == LIMITS.units_of(10 + 600)
    assert not decided(replace(half, grant_units=LIMITS.units_of(10 + 310.0), left_node_seconds=5000.0))


def test_a_start_gets_at_least_its_start_and_some_work_or_nothing():
    job = waiting("a", nodes=2, node_seconds=5000.0)
    start, work, margin = 10.0, LEAST_WORK_SECONDS, 10.0
    least = LIMITS.units_of(2 * (start + work + margin))
    assert first_grant(job, least, LIMITS) == least
    assert first_grant(job, least - CENT, LIMITS) is None


def test_a_job_that_is_expected_to_end_is_promised_a_share_of_its_whole_for_what_nobody_foresaw():
    nearly = replace(running("a", grant=LIMITS.units_of(10 + 10.0), node_seconds=500.0), left_node_seconds=0.0)
    assert seconds_ahead(nearly, LIMITS) == 10
    wanted = UNFORESEEN_SHARE * (10 + 500)
    assert next_grant(nearly, 10**18, LIMITS).grant_units == nearly.grant_units + LIMITS.units_of(wanted - 10)


def test_a_job_lacks_dollars_where_half_of_a_slice_is_not_free():
    job = replace(running("a", grant=LIMITS.units_of(10 + 100.0)), left_node_seconds=5000.0)
    few = next_grant(job, LIMITS.units_of(200.0), LIMITS)
    assert (few.grant_units, few.lacks) == (job.grant_units + LIMITS.units_of(200.0), False)
    assert next_grant(job, LIMITS.units_of(199.0), LIMITS).lacks


def test_where_dollars_run_short_the_last_in_rank_is_paused_so_that_the_first_ends():
    first = replace(running("first", grant=500 * CENT, priority=1), paid_units=490 * CENT, left_node_seconds=3000.0)
    middle = replace(running("middle", number=1, grant=5 * CENT), left_node_seconds=10.0)
    last = replace(running("last", number=2, grant=495 * CENT), paid_units=100 * CENT, left_node_seconds=3000.0)
    [pause] = decided(first, middle, last)
    assert isinstance(pause, Pause)
    assert (pause.job_id, "budget is running short" in pause.reason) == ("last", True)


def test_each_job_that_waits_says_for_what():
    def told(*jobs: Standing, limits: FleetLimits = LIMITS, now: float = 0.0) -> dict[str, str]:
        return Look(FleetFacts(limits=limits, jobs=jobs), now).waits

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

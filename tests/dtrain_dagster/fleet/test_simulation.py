"""Fleets played through in virtual time: whatever jobs do and wherever the orchestrator is, the budget holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain_dagster.fleet.grants import Standing
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState
from dtrain_dagster.fleet.scheduling import FleetFacts
from dtrain_dagster.fleet.simulation import SimulatedJob, Surroundings, play, play_on


def jobs_of(seed: int, count: int) -> list[SimulatedJob]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        least, expected = chance.choice((1, 1, 2)), chance.uniform(60, 4000)
        job = FleetJob(
            job_id=f"j{number}", priority=chance.randrange(3), least_nodes=least, most_nodes=least * 2,
            node_seconds=expected, startup_seconds=chance.uniform(5, 60),
        )  # fmt: skip
        found.append(
            SimulatedJob(
                job=job, arrives_at=chance.uniform(0, 2000), node_seconds=expected * chance.uniform(0.3, 4.0),
                fails_at=chance.choice((None, None, 0.5)), losses_per_node_hour=chance.choice((0.0, 2.0)),
            )
        )  # fmt: skip
    return found


def check(seed: int, count: int, share: float, away: list[tuple[float, float]]) -> None:
    jobs = jobs_of(seed, count)
    whole = sum(item.node_seconds for item in jobs) / 3600 * 3.06
    limits = FleetLimits(budget_usd=share * whole, nodes=4, usd_per_node_hour=3.06, slice_seconds=300.0)
    played = play(jobs, limits, Surroundings(seed=seed, away=away, look_seconds=60.0))
    assert played.overspent_usd == 0
    assert played.used_usd <= played.most_granted_usd <= limits.budget_usd
    assert played.most_nodes <= limits.nodes
    assert len(played.ends) == len(jobs)
    assert all(end.state.is_final and (end.reason or end.state == "succeeded" or end.launches) for end in played.ends)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 25), share=st.floats(0.05, 3.0))
def test_nothing_is_overspent_whatever_the_jobs_do(seed: int, count: int, share: float):
    check(seed, count, share, [])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0.1, 1.0), began=st.floats(0, 4000), lasts=st.floats(10, 20_000))
def test_nothing_is_overspent_while_the_orchestrator_is_dead(seed: int, share: float, began: float, lasts: float):
    check(seed, 12, share, [(began, began + lasts)])


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 80), share=st.floats(0.02, 3.0), began=st.floats(0, 9000))
def test_nothing_is_overspent_in_many_fleets(seed: int, count: int, share: float, began: float):
    check(seed, count, share, [(began, began + 1500.0), (began + 4000.0, began + 9000.0)])


@pytest.mark.parametrize("takes", [0.5, 1.0, 3.0])
def test_short_jobs_under_a_small_budget_are_not_paused_and_continued_in_turns(takes: float):
    """The budget is less than one slice beforehand: what it has left is for the work, and not for many starts."""
    jobs = [
        SimulatedJob(
            job=FleetJob(job_id=f"j{number}", node_seconds=1.0, startup_seconds=8.0), node_seconds=takes, arrives_at=0.0
        )
        for number in range(4)
    ]
    budget = 131 / 3600 * 3.06  # twice what all take to their ends, and the margin of two nodes
    limits = FleetLimits(budget_usd=budget, nodes=2, usd_per_node_hour=3.06)
    played = play(jobs, limits, Surroundings(look_seconds=0.5))
    assert played.overspent_usd == 0
    assert [end.state for end in played.ends] == ["succeeded"] * 4, [end.reason for end in played.ends]
    assert [end.launches for end in played.ends] == [1] * 4


def test_what_is_expected_of_a_fleet_is_told_from_where_it_stands():
    limits = FleetLimits(budget_usd=1.3, nodes=1, usd_per_node_hour=3.6, margin_seconds=10.0, slice_seconds=60.0)
    now, job = 5000.0, {"node_seconds": 400.0, "startup_seconds": 20.0}
    runs = Standing(
        job=FleetJob(job_id="runs", **job), number=0, state=FleetState.RUNNING, nodes=1,
        paid_units=limits.units_of(300), grant_units=limits.units_of(350), left_node_seconds=250.0, left_spread=0.1,
        launched_at=4700.0, is_training=True,
    )  # fmt: skip
    jobs = (runs, *(Standing(job=FleetJob(job_id=name, **job), number=1) for name in ("next", "poor")))
    facts = FleetFacts(limits=limits, jobs=jobs, settled_units=limits.units_of(50))
    runs_end, next_end, poor_end = play_on(facts, now)
    assert (runs_end.state, runs_end.begun_at, runs_end.ended_at) == ("succeeded", None, pytest.approx(now + 250))
    assert (next_end.state, next_end.begun_at) == ("succeeded", pytest.approx(now + 250))
    assert next_end.ended_at == pytest.approx(now + 250 + 420), "its promises are raised in time"
    assert (poor_end.state, poor_end.begun_at) == ("ended", None)
    assert "$0.2800 of the budget is left" in poor_end.reason
    assert play_on(facts, now, most_moves=9) == (), "what is too far away is not told"
    assert play_on(FleetFacts(limits=limits, jobs=()), now) == ()

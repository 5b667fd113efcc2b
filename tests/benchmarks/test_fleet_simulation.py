"""Fleets played through in virtual time: whatever jobs do and wherever the orchestrator is, the budget holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet_simulation import SimulatedJob, Surroundings, play
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits


def jobs_of(seed: int, count: int) -> list[SimulatedJob]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        expected = chance.uniform(60, 4000)
        job = FleetJob(
            job_id=f"j{number}", priority=chance.randrange(3), nodes=chance.choice((1, 1, 2)),
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
    limits = FleetLimits(budget_usd=share * whole, nodes=4, usd_per_node_hour=3.06)
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
    """What a small budget has left is for the work, and not for many starts."""
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

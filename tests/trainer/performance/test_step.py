"""What sums hold up of a step, against a backward pass that is played through."""

from __future__ import annotations

import random

import pytest

from trainer.performance.link import Link
from trainer.performance.step import StepParts, exposed_seconds


def play(network_times: list[float], hiding: float) -> float:
    """Sums go one after the other; all but the last are ready at once, the last when the backward pass is done."""
    clock = sum(network_times[:-1])
    return max(clock, hiding) + network_times[-1] - hiding


def test_what_is_exposed_is_what_is_left_when_the_backward_pass_is_done() -> None:
    chance = random.Random(1)
    for _ in range(500):
        network_times = [chance.uniform(0, 0.1) for _ in range(chance.randint(1, 6))]
        hiding = chance.choice([0.0, chance.uniform(0, 0.5)])
        assert exposed_seconds(network_times, hiding) == pytest.approx(play(network_times, hiding), abs=1e-12)


def test_the_last_sum_never_hides_and_without_sums_nothing_is_exposed() -> None:
    assert exposed_seconds([3.0, 2.0, 1.0], 100.0) == 1.0
    assert exposed_seconds([1.0], 100.0) == 1.0
    assert exposed_seconds([], 100.0) == 0.0


def test_a_step_is_its_computing_and_what_its_link_exposes() -> None:
    step = StepParts(computing_seconds=0.5, hiding_seconds=0.15, buckets=(1_000_000, 400_000))
    link = Link(latency_seconds=1e-3, seconds_per_byte=1e-7)
    assert step.predict_exposed(link.seconds) == pytest.approx(0.041), "the first, of 101 ms, hides"
    assert step.predict_seconds(link.seconds) == pytest.approx(0.541)
    slower = Link(latency_seconds=1e-3, seconds_per_byte=2e-7)
    assert step.predict_seconds(slower.seconds) == pytest.approx(0.5 + 0.201 - 0.15 + 0.081)

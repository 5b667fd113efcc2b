"""What estimates learn from their errors, on simulated histories: how often intervals hold what comes, and that no
correction makes estimates worse."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from dtrain_dagster.costs.estimate import PRIOR_SPREAD, LearnedCorrection, interval_margin
from dtrain_dagster.planning.evidence import spread_of_runs, step_spread
from dtrain_dagster.planning.scoring import learn_errors

RUNS, SEQUENCES = 20, 60
"""Runs of one history, the first without experience; and histories of each kind."""
Course = Callable[[random.Random], list[float]]


def quiet(spread: float) -> Course:
    return lambda chance: [chance.gauss(0, spread) for _ in range(RUNS)]


def biased(chance: random.Random) -> list[float]:
    return [chance.gauss(0.15, 0.08) for _ in range(RUNS)]


def loaded_at_times(chance: random.Random) -> list[float]:
    """Half of the runs beside other work, at times more of it during the probe, at times during the training."""
    return [chance.gauss(0, 0.06) + chance.gauss(0, 0.3) * (chance.random() < 0.5) for _ in range(RUNS)]


def changing(before: float, after: float) -> Course:
    return lambda chance: [(before if number < RUNS // 2 else after) + chance.gauss(0, 0.06) for number in range(RUNS)]


COURSES: dict[str, Course] = {
    "as assumed": quiet(PRIOR_SPREAD), "loaded at times": loaded_at_times, "biased": biased,
    "slower from then on": changing(0, 0.3),
}  # fmt: skip


def follow(errors: Sequence[float]) -> list[tuple[float, bool]]:
    """The error of each estimate after its correction, and whether its interval held it."""
    found = []
    for number, error in enumerate(errors):
        learned = learn_errors(errors[:number])
        left = error - math.log(learned.factor)
        found.append((abs(left), abs(left) <= interval_margin(learned.spread)))
    return found


@pytest.mark.parametrize("name", COURSES)
def test_intervals_hold_nine_of_ten_and_corrections_make_nothing_worse(name: str):
    chance = random.Random(name)
    courses = [COURSES[name](chance) for _ in range(SEQUENCES)]
    followed = [follow(errors) for errors in courses]
    held = [is_held for course in followed for _, is_held in course]
    assert 0.85 <= statistics.fmean(held) <= 0.97
    means = [
        (statistics.fmean(error for error, _ in course), statistics.fmean(map(abs, errors)))
        for course, errors in zip(followed, courses, strict=True)
    ]
    learned, unlearned = (statistics.fmean(part) for part in zip(*means, strict=True))
    assert learned <= unlearned + 0.004
    worse = sorted(with_it - without for with_it, without in means)
    assert worse[int(0.95 * len(worse))] <= 0.02


def test_a_bias_that_stands_out_is_corrected():
    late = [follow(biased(random.Random(seed)))[RUNS // 2 :] for seed in range(SEQUENCES)]
    assert statistics.fmean(error for course in late for error, _ in course) < 0.09  # without: 0.15


def test_errors_that_do_not_stand_out_correct_nothing():
    assert learn_errors([0.3, -0.3] * 6).factor == 1
    assert learn_errors([0.2] * 6).factor > 1.1
    assert learn_errors([0.2] * 2).factor == 1
    assert learn_errors([]) == LearnedCorrection()


def test_an_interval_that_missed_makes_the_next_one_wider_and_those_that_held_narrower():
    quiet_runs = learn_errors([0.01, -0.01] * 5)
    missed = learn_errors([0.01, -0.01] * 5 + [0.5])
    assert missed.spread > 2 * quiet_runs.spread
    assert quiet_runs.spread < PRIOR_SPREAD
    after = [learn_errors([0.01, -0.01] * 5 + [0.5] + [0.01, -0.01] * count).spread for count in range(8)]
    assert after == sorted(after, reverse=True)


def test_runs_that_vary_widen_what_rests_on_them():
    assert spread_of_runs([100.0]) == spread_of_runs([]) == 0.0
    alike, varied = (spread_of_runs([100.0 * math.exp(x) for x in logs]) for logs in ([0.0] * 5, [-0.3, 0.3, 0, 0.4]))
    assert alike < PRIOR_SPREAD < 1.5 * PRIOR_SPREAD < varied
    chance = random.Random(4)
    many = spread_of_runs([math.exp(chance.gauss(0, 0.27)) for _ in range(200)])
    assert many == pytest.approx(0.27, rel=0.15)


def test_slow_changes_within_a_probe_count_in_full_and_quick_ones_average_out():
    chance = random.Random(5)
    quick = [1 + chance.gauss(0, 0.1) for _ in range(60)]
    assert step_spread(quick) == pytest.approx(0.1 / math.sqrt(60), rel=0.6)
    slow = [value + (0.4 if number >= 40 else 0.0) for number, value in enumerate(quick)]
    assert step_spread(slow) > 0.15
    assert step_spread([1.0]) == 0.0
    assert step_spread([1.0] * 9) == 0.0
    assert step_spread([1.0, 1.2]) == pytest.approx(0.1 / 1.1)

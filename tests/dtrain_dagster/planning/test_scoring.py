"""What estimates learn from their errors, on simulated histories: how often intervals hold what comes, and that no
correction makes estimates worse."""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dtrain_dagster.costs.estimate import (
    PRIOR_SPREAD,
    Forecast,
    LearnedCorrection,
    Measured,
    Sizes,
    interval_margin,
)
from dtrain_dagster.planning.build_plan import tell_load
from dtrain_dagster.planning.history import spread_of_runs
from dtrain_dagster.planning.measured import step_spread
from dtrain_dagster.planning.probe import cores_of_others
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


def wandering(chance: random.Random) -> list[float]:
    errors, state = [], 0.0
    for _ in range(RUNS):
        state = 0.8 * state + chance.gauss(0, 0.1)
        errors.append(state + chance.gauss(0, 0.05))
    return errors


def drifting(first: float, last: float) -> Course:
    return lambda chance: [
        first + (last - first) * number / RUNS + chance.gauss(0, 0.06) for number in range(RUNS)
    ]  # fmt: skip


def changing(before: float, after: float) -> Course:
    return lambda chance: [(before if number < RUNS // 2 else after) + chance.gauss(0, 0.06) for number in range(RUNS)]


COURSES: dict[str, Course] = {
    "very quiet": quiet(0.04), "quiet": quiet(0.06), "as assumed": quiet(PRIOR_SPREAD), "always loaded": quiet(0.27),
    "loaded at times": loaded_at_times, "biased": biased, "wandering": wandering, "slower and slower": drifting(0, 0.4),
    "slow at first": drifting(0.4, 0), "slower from then on": changing(0, 0.3), "slow until then": changing(0.3, 0),
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


def test_what_would_not_have_improved_the_past_is_not_applied():
    assert learn_errors([0.3, -0.3] * 6).factor == 1
    assert learn_errors([0.2] * 6).factor > 1.1
    assert learn_errors([0.2] * 2).factor == 1
    # A mean that stands out, of errors that have grown smaller: corrections learned on the way would have done harm.
    assert learn_errors([0.3, 0.3, 0.3, 0.3, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0]).factor == 1
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


def test_other_work_on_the_machine_widens_the_interval_where_it_takes_cores_that_ranks_need():
    sizes = Sizes(
        train_samples=1000, valid_samples=200, test_samples=400, batch_size_per_rank=50, micro_batches_per_rank=1,
        processes_per_node=1, epochs=4, max_steps=None, eval_frequency=None, checkpoint_frequency=15, cores=2,
    )  # fmt: skip
    assert sizes.load_spread(1, 0.0) == sizes.load_spread(3, 0.0) == 0.0
    assert sizes.load_spread(1, 0.5) == 0.0  # one rank and one core of other work at most: two cores suffice
    assert sizes.load_spread(2, 0.5) == pytest.approx(math.log(1.5) / 2)
    assert sizes.load_spread(3, 0.5) == pytest.approx(math.log(2 / 1.5) / 2)
    assert replace(sizes, cores=None).load_spread(3, 2.0) == 0.0
    step = Measured(node_count=2, startup_seconds=1.0, step_seconds=0.1)
    alone = Forecast(measured=(step,), sizes=sizes, basis="probe", basis_words="")
    beside = replace(alone, other_cores=0.5)
    narrow, wide = alone.seconds_at(2), beside.seconds_at(2)
    assert wide.expected == narrow.expected
    assert wide.high > 1.2 * narrow.high
    assert wide.low < narrow.low / 1.2
    assert tell_load(alone, 2) == tell_load(beside, 1) == ""
    assert "other work took 0.5 of 2 cores when this was estimated" in tell_load(beside, 2)
    varied = replace(alone, run_spread=0.3)
    assert varied.seconds_at(2).high > 1.3 * narrow.high


def test_the_cores_that_other_work_takes_are_seen():
    sizes = Sizes(
        train_samples=1, valid_samples=1, test_samples=1, batch_size_per_rank=1, micro_batches_per_rank=1,
        processes_per_node=1, epochs=1, max_steps=None, eval_frequency=None, checkpoint_frequency=1,
        cores=os.cpu_count(),
    )  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert 0.4 < cores_of_others(sizes) <= (os.cpu_count() or 1)
    finally:
        other.kill()
        other.wait()
    assert cores_of_others(replace(sizes, cores=None)) == 0.0

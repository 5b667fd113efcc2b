"""What is expected of learning curves, and which trials are worth their dollars."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_search import play, source_of

from dtrain_dagster.search.curves import Curve, floor_of, prior_of, shapes
from dtrain_dagster.search.pruning import Pruner
from dtrain_dagster.search.sampling import Sampler
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.worth import Fresh, TrialCost, WorthVerdict, best_prospect, courses_of, judge_worth

OF = 12
COST = TrialCost(startup_usd=2.0, evaluation_usd=1.0)


def drawn(seed: int, count: int) -> list[Curve]:
    """Curves as of trials with different values: power laws to different ends, with noise."""
    random, found = np.random.default_rng(seed), []
    for _ in range(count):
        end, drop, power = np.exp(random.normal(-1.5, 0.7)), np.exp(random.normal(0.0, 0.3)), random.uniform(0.4, 1.5)
        place = np.arange(1, OF + 1)
        clean = end + drop * (place**-power - OF**-power)
        found.append(Curve(tuple(clean * np.exp(0.03 * random.standard_normal(OF))), OF))
    return found


def begun(curve: Curve, done: int) -> Curve:
    return Curve(curve.scores[:done], curve.of)


def judged(
    curve: Curve, cost: TrialCost, known: list[Curve], fresh: TrialCost, of: int = OF, usd: float | None = None
) -> WorthVerdict | None:
    """What becomes of a trial where values say nothing; None where nothing is known."""
    floor = floor_of([*known, curve])
    prior = prior_of(known, floor)
    if prior is None:
        return None
    best = min(each.best for each in [*known, curve] if math.isfinite(each.best))
    return judge_worth(curve, cost, prior, Fresh(prior, fresh, of), floor, best, usd)


def ends(*found: object, **more: float) -> bool:
    verdict = judged(*found, **more)  # type: ignore[arg-type]
    assert verdict is not None
    return verdict.ends


def test_shapes_fall_from_one_to_nought() -> None:
    for of in (2, 5, 40):
        rows = shapes(of)
        assert np.allclose(rows[:, 0], 1)
        assert np.allclose(rows[:, -1], 0)
        assert (np.diff(rows, axis=1) <= 1e-12).all()


@pytest.mark.parametrize("done", [1, 3, 6])
def test_intervals_hold_what_they_promise(done: int) -> None:
    """Of trials that were not known, the end lies in the middle 80 % of what was expected about that often; and what
    is expected is nearer to it than the score of the moment."""
    known, held, error, naive = drawn(0, 24), 0, [], []
    fresh = drawn(1, 60)
    floor = floor_of([*known, *fresh])
    prior = prior_of(known, floor)
    assert prior is not None
    for curve in fresh:
        ends = courses_of(begun(curve, done), prior, floor)[:, -1]
        low, middle, high = np.percentile(ends, [10, 50, 90])
        held += low <= curve.scores[-1] <= high
        error.append(abs(math.log(middle / curve.scores[-1])))
        naive.append(abs(math.log(curve.scores[done - 1] / curve.scores[-1])))
    assert 0.6 <= held / len(fresh) <= 0.97
    assert np.mean(error) < 0.5 * np.mean(naive)


def test_more_evaluations_make_a_prediction_narrower() -> None:
    known = drawn(0, 12)
    curve = drawn(2, 1)[0]
    floor = floor_of([*known, curve])
    prior = prior_of(known, floor)
    assert prior is not None
    widths = [np.ptp(np.percentile(courses_of(begun(curve, n), prior, floor)[:, -1], [10, 90])) for n in (1, 4, 9)]
    assert widths[0] > widths[1] > widths[2]


def test_a_trial_without_a_chance_ends_and_the_best_goes_on() -> None:
    known = drawn(3, 10)
    best = min(known, key=lambda curve: curve.best)
    hopeless = Curve(tuple(3.0 + 0.5 / place for place in range(1, 4)), OF)
    verdict = judged(hopeless, COST, known, COST)
    assert verdict is not None
    assert verdict.ends
    assert verdict.here.chance < 0.05
    assert verdict.reason.startswith("not worth it: 9 dollars more, with a chance of")
    assert not ends(begun(best, 4), COST, [curve for curve in known if curve is not best], COST)


def test_it_is_the_dollars_that_decide() -> None:
    """The same trial goes on where a fresh one is dear, and ends where its own rest is."""
    known = drawn(3, 10)
    ordinary = sorted(known, key=lambda curve: curve.best)[3]
    others = [curve for curve in known if curve is not ordinary]
    dear = TrialCost(startup_usd=1e6, evaluation_usd=1.0)
    assert not ends(begun(ordinary, 5), COST, others, dear)
    slow = TrialCost(startup_usd=2.0, evaluation_usd=1e6)
    assert ends(begun(ordinary, 5), slow, others, COST)


def test_a_price_that_was_set_ends_what_a_fresh_trial_would_not() -> None:
    known = drawn(3, 10)
    ordinary = sorted(known, key=lambda curve: curve.best)[3]
    others = [curve for curve in known if curve is not ordinary]
    dear = TrialCost(startup_usd=1e6, evaluation_usd=1.0)
    assert not ends(begun(ordinary, 5), COST, others, dear, usd=1e9)
    verdict = judged(begun(ordinary, 5), COST, others, dear, usd=1e-3)
    assert verdict is not None
    assert verdict.ends
    assert "and 1e+03 is asked for" in verdict.reason


@given(
    st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=6), max_size=5),
    st.lists(st.floats(-50, 50) | st.just(math.inf), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_any_history_gives_a_decision(others: list[list[float]], own: list[float]) -> None:
    """Scores may be negative, equal, few, or none: nothing overflows or divides by nought."""
    with np.errstate(all="raise", under="ignore"):
        curves = [Curve(tuple(scores), 6) for scores in others]
        if math.isfinite(own[-1]):
            verdict = judged(Curve(tuple(own), 6), COST, curves, COST, 6)
            assert verdict is None or (verdict.here.gain >= 0 and math.isfinite(verdict.here.usd))
            assert verdict is not None or not curves


def test_the_best_plan_counts_each_part_of_its_cost_and_gain() -> None:
    """Two courses: one falls to 0, the other stays. Looked at after the first evaluation, only the good one is paid."""
    paths = np.array([[1.5, 0.0], [2.0, 2.0]] * 4)
    plan = best_prospect(paths, 1.0, np.array([1.0, 11.0]), 0.0)
    assert plan.gain == pytest.approx(0.5)  # half of them reach 0, from 1
    assert plan.usd == pytest.approx(1.0 + 0.5 * 10.0)
    assert plan.chance == 0.5


def test_the_same_score_costs_less_than_with_every_trial_trained_to_its_end() -> None:
    for seed in range(3):
        every, worth = (
            play(
                source_of(SearchSettings(trials=24, parallel=2, sampler=Sampler.RANDOM, pruner=pruner, seed=seed)),
                [],
            )
            for pruner in (Pruner.NONE, Pruner.WORTH)
        )
        assert every.best is not None
        assert worth.best is not None
        assert sum(trial.usd for trial in worth.trials) < 0.6 * sum(trial.usd for trial in every.trials)
        first, last = (source.best.best(1.0) for source in (every, worth))
        assert last is not None
        assert first is not None
        assert last < first + 0.1


def test_a_search_ends_where_no_trial_is_worth_its_price() -> None:
    dear = SearchSettings(trials=30, sampler=Sampler.RANDOM, pruner=Pruner.WORTH, worth_usd=1e-3)
    source = play(source_of(dear), [])
    assert len(source.trials) < 30
    assert source.ended.startswith("no further trial is worth its cost")
    cheap = SearchSettings(trials=12, sampler=Sampler.RANDOM, pruner=Pruner.WORTH, worth_usd=1e6)
    assert len(play(source_of(cheap), []).trials) == 12

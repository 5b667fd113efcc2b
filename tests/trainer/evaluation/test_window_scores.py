from __future__ import annotations

import math

import numpy as np
import pytest
import scipy

from trainer.evaluation import window_scores as scores

DAYS = np.repeat(np.datetime64("2020-01-01") + np.arange(40), 6)


def test_newey_west_without_lags_is_the_ordinary_t() -> None:
    x = np.random.default_rng(0).normal(0.3, 1.0, 50)
    expected = x.mean() / (x.std() / math.sqrt(50))
    assert scores.newey_west_t(x, 0) == pytest.approx(expected)


def test_newey_west_by_hand() -> None:
    x = np.array([1.0, 2.0, 4.0, 3.0, 5.0])  # deviations -2 -1 1 0 2: variance 2, lag-1 autocovariance 1/5, weight 1/2
    assert scores.newey_west_t(x, 1) == pytest.approx(3 / math.sqrt((2 + 2 * 0.5 * 0.2) / 5))


def test_overlapping_labels_do_not_look_like_evidence() -> None:
    noise = np.random.default_rng(1).normal(size=2004)
    overlapping = np.convolve(noise, np.ones(5), "valid") + 0.2
    plain, robust = scores.newey_west_t(overlapping, 0), scores.newey_west_t(overlapping, 10)
    assert plain is not None
    assert robust is not None
    assert robust < plain / 1.7


def test_too_few_days_give_no_t() -> None:
    assert scores.newey_west_t(np.ones(5), 10) is None
    assert scores.newey_west_t(np.ones(50), 10) is None


def test_lag_covers_the_overlap() -> None:
    assert scores.newey_west_lag(100, 5) == 10
    assert scores.newey_west_lag(2000, 1) == 7


def test_rank_ic_is_spearmans_per_day_with_ties() -> None:
    random = np.random.default_rng(2)
    mu, target = random.integers(0, 4, 240).astype(float), random.normal(size=240)
    order = random.permutation(240)
    got = scores.rank_ic_by_day(mu[order], target[order], DAYS[order])
    expected = [scipy.stats.spearmanr(mu[day == DAYS], target[day == DAYS]).statistic for day in np.unique(DAYS)]
    np.testing.assert_allclose(got, [value for value in expected if not np.isnan(value)], atol=1e-12)


def test_days_without_a_ranking_are_left_out() -> None:
    assert len(scores.rank_ic_by_day(np.zeros(240), np.arange(240.0), DAYS)) == 0
    assert len(scores.rank_ic_by_day(np.arange(4.0), np.arange(4.0), np.array([1, 1, 2, 2]))) == 0


def test_a_drifting_market_gives_no_accuracy_away() -> None:
    random = np.random.default_rng(3)
    target = random.normal(0.5, 1.0, 20_000)  # up 69 % of the time
    hits = scores.direction_scores(random.normal(2.0, 1.0, 20_000), target)  # nearly always up, knows nothing
    assert hits is not None
    assert hits.mean() == pytest.approx(0.5, abs=0.015)
    perfect = scores.direction_scores(target, target)
    assert perfect is not None
    assert perfect.mean() == pytest.approx(1.0)
    assert scores.direction_scores(np.ones(10), random.normal(size=10)) is None


def test_skill_of_the_truth_and_of_zero() -> None:
    target = np.random.default_rng(4).normal(size=240)
    truth = scores.mean_skill(target, target, DAYS, horizon=5)
    assert truth["rank_ic"] == pytest.approx(1.0)
    assert truth["mse_to_zero"] == pytest.approx(0.0)
    nothing = scores.mean_skill(np.zeros(240), target, DAYS, horizon=5)
    assert nothing["mse_to_zero"] == pytest.approx(1.0)
    assert nothing["rank_ic"] is None
    assert nothing["balanced_accuracy"] is None


def test_quintiles_are_fifths_by_rank() -> None:
    values = np.array([50.0, 10.0, 40.0, 20.0, 30.0, 60.0, 70.0, 80.0, 90.0, 100.0])
    assert scores.quintiles(values).tolist() == [2, 0, 1, 0, 1, 2, 3, 3, 4, 4]


def test_halves_split_the_days_not_the_samples() -> None:
    days = np.array([1, 1, 1, 1, 2, 3, 4])
    early, late = scores.halves(days)
    assert early.tolist() == [True] * 5 + [False] * 2
    assert (early ^ late).all()

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import scipy
from market import Market

from trainer.evaluation import window_baselines as baselines
from trainer.evaluation.window_baselines import baseline_forecasts, fit_student_t
from trainer.evaluation.window_report import score_forecast

NAMES = {"constant", "last_value", "ewma", "har", "har_x", "ridge", "drift", "ridge_mean"}


@pytest.mark.parametrize(("scale", "nu"), [(0.02, 3.0), (1.0, 6.0), (50.0, 25.0)])
def test_fit_is_the_maximum_of_the_likelihood(scale: float, nu: float) -> None:
    z = scipy.stats.t.rvs(nu, scale=scale, size=20_000, random_state=0)
    got_scale, got_nu = fit_student_t(z)
    best = scipy.stats.t.logpdf(z, got_nu, scale=got_scale).mean()
    assert got_scale == pytest.approx(scale, rel=0.03)
    for other_scale, other_nu in ((scale, nu), (got_scale * 1.02, got_nu), (got_scale, got_nu * 1.1)):
        assert best >= scipy.stats.t.logpdf(z, other_nu, scale=other_scale).mean()


def test_fit_survives_zeros_and_refuses_nothing_but_zeros() -> None:
    z = np.r_[np.zeros(400), scipy.stats.t.rvs(5, size=600, random_state=0)]
    scale, nu = fit_student_t(z)
    assert scale > 0
    assert nu > 2
    with pytest.raises(ValueError, match="all zero"):
        fit_student_t(np.zeros(10))


@pytest.fixture(scope="module")
def nll(market: Market) -> dict[str, float]:
    rows = market.end_rows("test", np.arange(market.count("test")))
    target = market.column("target_return", rows)
    forecasts = baseline_forecasts(market, "test")
    assert set(forecasts) == NAMES
    judged = {name: score_forecast(forecast.predictive, target) for name, forecast in forecasts.items()}
    return {name: values["nll"].mean() for name, values in judged.items() if values}


def test_what_knows_volatility_beats_what_does_not(nll: dict[str, float]) -> None:
    assert set(nll) == NAMES - {"drift", "ridge_mean"}
    assert max(nll["ewma"], nll["har"], nll["har_x"], nll["ridge"]) < nll["constant"] - 0.02
    assert nll["har"] < nll["last_value"]


def test_forecasts_do_not_know_the_judged_targets(market: Market) -> None:
    other = copy.copy(market)
    other.columns = {name: values.copy() for name, values in market.columns.items()}
    for name in ("target_return", "target_log_rv"):
        other.columns[name][market.rows["test"]] += 1.0
    before, after = baseline_forecasts(market, "test"), baseline_forecasts(other, "test")
    for name, forecast in before.items():
        for field in ("mu", "sigma", "nu"):
            np.testing.assert_array_equal(getattr(forecast, field), getattr(after[name], field), err_msg=name)


def test_ridge_is_the_closed_form_whatever_the_chunks(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "PENALTIES", (0.1,))
    whole = baseline_forecasts(market, "test")
    monkeypatch.setattr(baselines, "CHUNK", 97)
    chunked = baseline_forecasts(market, "test")
    np.testing.assert_allclose(chunked["ridge"].sigma, whole["ridge"].sigma, rtol=1e-4)
    rows = {split: market.end_rows(split, np.arange(market.count(split))) for split in ("train", "test")}
    mean, std = np.array(market.spec.feature_mean), np.array(market.spec.feature_std)
    x = {s: ((market.gather(r)[0].numpy() - mean) / std).reshape(len(r), -1) for s, r in rows.items()}
    y = market.column("target_return", rows["train"])
    n = len(y)
    weights = np.linalg.solve(
        x["train"].T @ x["train"] / n + 0.1 * np.eye(x["train"].shape[1]), x["train"].T @ (y - y.mean()) / n
    )
    np.testing.assert_allclose(whole["ridge_mean"].mu, x["test"] @ weights + y.mean(), atol=2e-5)


def test_a_ticker_without_history_gets_the_average_scale(market: Market) -> None:
    other = copy.copy(market)
    other.rows = {**market.rows, "train": market.rows["train"][market.tickers(market.rows["train"]) != 3]}
    sigma = baseline_forecasts(other, "test")["constant"].sigma
    assert sigma is not None
    tickers = other.tickers(other.rows["test"])
    known = [np.unique(sigma[tickers == name]) for name in (0, 1, 2, 4, 5)]
    unknown = np.unique(sigma[tickers == 3])
    assert all(len(values) == 1 for values in (*known, unknown))
    assert min(known) < unknown < max(known)


def test_baselines_whose_features_are_missing_are_left_out(market: Market) -> None:
    other = copy.copy(market)
    other.features = market.features[:, :5]
    other.spec = dataclasses.replace(
        market.spec,
        features=market.spec.features[:5],
        feature_mean=market.spec.feature_mean[:5],
        feature_std=market.spec.feature_std[:5],
    )
    assert set(baseline_forecasts(other, "test")) == NAMES - {"har_x"}

"""Years judged together: the statistic is that of one model over all days, and regimes look back only."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.year_scores import YearScores, judge_years, market_regimes, score_predictions, turbulent_days
from tests.trainer.market import Market
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.config import FactoryConfig
from trainer.evaluation.evaluate import JudgeRequest
from trainer.evaluation.window_judge import forecast_windows
from trainer.evaluation.window_report import Predictions, build_report, judge_baselines
from trainer.evaluation.window_scores import newey_west_lag, newey_west_t
from trainer.model.build import build_loss, build_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def market() -> Market:
    return Market()


def forecaster(market: Market) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model that has forecasts to make although nobody trained it."""
    torch.manual_seed(0)
    criterion = build_loss(FactoryConfig(factory="student_t"), market.spec)
    model = build_model(FactoryConfig(factory="tcn"), market.spec, 3)
    torch.nn.init.normal_(model.get_submodule("model.head").weight, std=0.2)
    return model, criterion


def year(
    number: int, gains: dict[str, float], *, days: int = 200, noise: float = 0.05, cover: float = 0.9
) -> YearScores:
    """A year in which the model is better than each baseline by so many nats, up to noise."""
    random = np.random.default_rng(number)
    nll = -2 + 0.3 * random.standard_normal(days)
    return YearScores(
        year=number,
        days=np.datetime64(f"{number}-01-02") + np.arange(days),
        windows=np.full(days, 20),
        nll=nll,
        coverage_90=np.full(days, cover),
        baselines={name: nll + gain + noise * random.standard_normal(days) for name, gain in gains.items()},
        turbulent=np.arange(days) >= days // 2,
    )


GOOD = {"ewma": 0.03, "har_x": 0.02, "ridge": 0.0}


def test_years_together_are_one_series() -> None:
    years = [year(number, GOOD) for number in range(2000, 2006)]
    report = judge_years(years[::-1])
    series = np.concatenate([item.baselines["har_x"] - item.nll for item in years])
    gain = report["all"]["gains"]["har_x"]
    assert gain["nats"] == pytest.approx(series.mean())
    assert gain["t"] == pytest.approx(newey_west_t(series, newey_west_lag(len(series), 5)))
    assert list(report["by_year"]) == [str(number) for number in range(2000, 2006)]
    assert report["by_year"]["2003"]["gains"]["har_x"]["nats"] == pytest.approx(
        (years[3].baselines["har_x"] - years[3].nll).mean()
    )
    json.dumps(report, allow_nan=False)


def test_days_weigh_by_their_windows() -> None:
    one = year(2000, {"ewma": 0.0}, noise=0.0)
    heavy = replace(
        one, baselines={"ewma": one.nll + np.r_[np.ones(1), np.zeros(199)]}, windows=np.r_[[3801], [1] * 199]
    )
    assert judge_years([heavy])["all"]["gains"]["ewma"]["nats"] == pytest.approx(3801 / 4000)


def test_regimes_share_the_days_between_them() -> None:
    one = year(2000, {"ewma": 0.0}, noise=0.0)
    stormy = replace(one, baselines={"ewma": one.nll + 0.1 * np.asarray(one.turbulent)})
    regimes = judge_years([stormy, year(2001, {"ewma": 0.0}, noise=0.0)])["by_regime"]
    assert {name: found["days"] for name, found in regimes.items()} == {"calm": 200, "turbulent": 200}
    assert regimes["calm"]["gains"]["ewma"]["nats"] == pytest.approx(0.0)
    assert regimes["turbulent"]["gains"]["ewma"]["nats"] == pytest.approx(0.05)
    assert judge_years([replace(one, turbulent=None)])["by_regime"] == {}


def test_whether_a_day_is_turbulent_depends_on_no_later_day() -> None:
    volatility = np.random.default_rng(1).standard_normal(300)
    found = turbulent_days(volatility)
    assert not found[0]
    for day in (1, 2, 7, 299):
        assert found[day] == (volatility[day] > np.median(volatility[:day]))
        assert (turbulent_days(np.r_[volatility[: day + 1], np.full(50, 9.0)])[: day + 1] == found[: day + 1]).all()


def test_a_baseline_that_a_year_lacks_is_not_judged_over_all() -> None:
    report = judge_years([year(2000, GOOD), year(2001, {"ewma": 0.03, "har_x": 0.02})])
    assert set(report["all"]["gains"]) == {"ewma", "har_x"}
    assert set(report["by_year"]["2000"]["gains"]) == set(GOOD)


@pytest.mark.parametrize("years", [[], [year(2000, GOOD), year(2000, GOOD)]])
def test_no_year_or_one_twice_is_refused(years: list[YearScores]) -> None:
    with pytest.raises(ValueError, match="each of them only once"):
        judge_years(years)


def forecasts(model: torch.nn.Module, criterion: torch.nn.Module, market: Market) -> Predictions:
    request = JudgeRequest(model=model, world=World(RankFacts(), CPU, "gloo"), device=CPU, batch_size=64)
    return forecast_windows(criterion, market, "test", request)[1]


def test_a_year_s_figures_are_those_of_its_evaluation(market: Market) -> None:
    model, criterion = forecaster(market)
    found = forecasts(model, criterion, market)
    days = market.dates(found.row).astype("datetime64[D]")
    baselines = judge_baselines(market, "test")
    report = build_report(found, days, baselines, market.spec.horizon)
    scores = score_predictions(2003, found, market)
    judged = judge_years([scores])["all"]
    assert judged["nll"] == pytest.approx(report["model"]["nll"])
    assert judged["coverage_90"] == pytest.approx(report["model"]["coverage_90"])
    for name, row in report["baselines"].items():
        if "nll" in row:
            assert judged["gains"][name]["nats"] == pytest.approx(row["model_gain_nll"])
            assert judged["gains"][name]["t"] == pytest.approx(row["model_gain_t"])
    regimes = market_regimes(market)
    assert regimes is not None
    assert scores.turbulent is not None
    assert scores.turbulent.tolist() == [regimes[day] for day in scores.days]


def test_a_forecast_of_the_mean_alone_has_no_likelihood(market: Market) -> None:
    model, criterion = forecaster(market)
    found = forecasts(model, criterion, market)
    blind = replace(found, sigma=np.full_like(found.sigma, np.nan))
    with pytest.raises(ValueError, match="predicts no distribution"):
        score_predictions(2003, blind, market)

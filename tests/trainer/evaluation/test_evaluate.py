from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from market import Market
from thread_worlds import ALONE, CPU, at_once, thread_worlds
from torch import Tensor, nn

from trainer.comm.world import World
from trainer.config import FactoryConfig
from trainer.data.sampler import spread_positions
from trainer.engine.window_problem import WindowJudge, forecast_windows
from trainer.evaluation import window_baselines
from trainer.evaluation.evaluate import Evaluation, JudgeRequest
from trainer.evaluation.window_report import Predictions, build_report
from trainer.model.build import build_loss, build_model
from trainer.rundir import RunDir

NAMES = {"constant", "last_value", "ewma", "har", "har_x", "ridge", "drift", "ridge_mean"}


def forecaster(market: Market, loss: str = "student_t") -> tuple[nn.Module, nn.Module]:
    """A model that has forecasts to make although nobody trained it: the same on every rank."""
    torch.manual_seed(0)
    criterion = build_loss(FactoryConfig(factory=loss), market.spec)
    model = build_model(FactoryConfig(factory="tcn"), market.spec, int(criterion.outputs))  # type: ignore[arg-type]
    nn.init.normal_(model.get_submodule("model.head").weight, std=0.2)
    return model, criterion


def judge_of(criterion: nn.Module, market: Market) -> WindowJudge:
    """The judge of a job whose loss is this one."""
    return WindowJudge(criterion, market, lambda _: criterion)  # type: ignore[arg-type]


def ask(model: nn.Module, batch_size: int = 1024) -> JudgeRequest:
    return JudgeRequest(model=model, world=ALONE, device=CPU, batch_size=batch_size)


def validate(market: Market, model: nn.Module, criterion: nn.Module, batch_size: int = 64) -> Evaluation:
    return judge_of(criterion, market).validate(ask(model, batch_size))


def forecasts(
    market: Market, model: nn.Module, criterion: nn.Module, split: str = "valid", size: int = 64
) -> Predictions:
    return forecast_windows(criterion, market, split, ask(model, size))[1]  # type: ignore[arg-type]


def report_on(market: Market, model: nn.Module, criterion: nn.Module, folder: Path) -> dict[str, Any]:
    return judge_of(criterion, market).report(ask(model), RunDir(str(folder)), lambda _: None)


def test_metrics_are_what_scipy_says(market: Market) -> None:
    model, criterion = forecaster(market)
    result, predictions = validate(market, model, criterion), forecasts(market, model, criterion)
    rows = market.end_rows("valid", np.arange(market.count("valid")))
    windows, target = market.gather(rows)
    with torch.no_grad():
        predictive = criterion.predictive(model.eval()(windows))
    mu, sigma, nu = (part.double().numpy() for part in (predictive.mu, predictive.sigma, predictive.nu))
    y = target.double().numpy()
    nll = -scipy.stats.t.logpdf(y, nu, mu, sigma)
    levels = {q: scipy.stats.t.ppf(q, nu, mu, sigma) for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
    pinball = np.mean([np.maximum(q * (y - at), (q - 1) * (y - at)) for q, at in levels.items()])
    assert result.samples == len(rows)
    assert result.loss == pytest.approx(nll.mean(), rel=1e-5)
    assert result.metrics == pytest.approx(
        {
            "nll": nll.mean(),
            "pinball": pinball,
            "coverage_90": ((y >= levels[0.05]) & (y <= levels[0.95])).mean(),
            "mse_to_zero": ((y - mu) ** 2).mean() / (y**2).mean(),
        },
        rel=1e-5,
    )
    np.testing.assert_array_equal(predictions.row, rows)
    np.testing.assert_allclose(predictions.sigma, sigma, rtol=1e-5)


def test_the_batch_size_changes_nothing_and_the_models_mode_stays(market: Market) -> None:
    model, criterion = forecaster(market)
    model.train()
    one, other = (validate(market, model, criterion, size) for size in (17, 10_000))
    assert model.training
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    assert one.metrics == pytest.approx(other.metrics, rel=1e-6)


def judge_on(size: int, folder: Path, samples: int) -> list[tuple[Evaluation, list[int], dict[str, Any]]]:
    """What each rank of a world makes of so many samples: its scores, the rows of its forecasts, and the report."""
    markets = [Market() for _ in range(size)]
    models = [forecaster(market) for market in markets]  # one after the other, for there is one random state only

    def work(world: World) -> Any:
        market, (model, criterion) = markets[world.rank], models[world.rank]
        market.rows["valid"] = market.rows["valid"][:samples]
        judge, request = judge_of(criterion, market), replace(ask(model, 100), world=world)
        evaluation = judge.validate(request)
        _, predictions = forecast_windows(criterion, market, "valid", request)  # type: ignore[arg-type]
        report = judge.report(replace(request, batch_size=64), RunDir(str(folder)), lambda _: None)
        return evaluation, predictions.row.tolist(), report

    with thread_worlds([0] * size) as worlds:
        return at_once(work, worlds)


@pytest.mark.parametrize(("size", "samples"), [(2, 401), (3, 401), (3, 2)])
def test_ranks_share_an_evaluation_and_every_sample_counts_once(
    size: int, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report bit for bit."""
    monkeypatch.setattr(window_baselines, "CHUNK", 97)  # so that the small market has some for each rank
    [(alone, rows, report)] = judge_on(1, tmp_path / "alone", samples)
    assert (alone.samples, len(rows), set(report["baselines"])) == (samples, samples, NAMES)
    for evaluation, mine, other in judge_on(size, tmp_path / "many", samples):
        assert (mine, other, evaluation.samples) == (rows, report, samples)
        assert evaluation.loss == pytest.approx(alone.loss, rel=1e-6)
        assert evaluation.metrics == pytest.approx(alone.metrics, rel=1e-6)
    assert {**(RunDir(str(tmp_path / "many")).read_json("evaluation.json") or {}), "correction": {}} == report
    with np.load(tmp_path / "alone/predictions.npz") as one, np.load(tmp_path / "many/predictions.npz") as other:
        for name, values in one.items():
            np.testing.assert_array_equal(other[name], values, err_msg=name)


def test_of_a_large_split_all_counts_and_a_part_is_kept(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    model, criterion = forecaster(market)
    loss, whole = forecast_windows(criterion, market, "valid", ask(model, 64))  # type: ignore[arg-type]
    for module in ("evaluation.evaluate", "engine.window_problem"):
        monkeypatch.setattr(f"trainer.{module}.spread_positions", partial(spread_positions, most=101))
    part_loss, part = forecast_windows(criterion, market, "valid", ask(model, 64))  # type: ignore[arg-type]
    assert part_loss == loss
    count = market.count("valid")
    positions = spread_positions(count, 101)
    steps = np.diff(positions)
    assert (len(positions), positions[0]) == (101, 0)
    assert steps.max() - steps.min() <= 1
    assert positions[-1] + steps.max() >= count
    np.testing.assert_array_equal(part.row, whole.row[positions])
    np.testing.assert_allclose(part.mu, whole.mu[positions], rtol=1e-5)


class Median(nn.Module):
    """A loss that says nothing about what its outputs mean."""

    outputs = 1

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - target).abs()


def test_a_point_loss_is_judged_by_its_squared_error_and_one_that_explains_nothing_by_itself(
    market: Market, tmp_path: Path
) -> None:
    model, criterion = forecaster(market, "mse")
    assert set(validate(market, model, criterion).metrics) == {"mse_to_zero"}
    report = report_on(market, model, criterion, tmp_path)
    assert "nll" not in report["model"]
    assert report["calibration"] == []
    assert not report["gate"]["passed"]
    assert "nll" in report["baselines"]["har"]
    assert validate(market, model, Median()).metrics == {}
    assert set(report_on(market, model, Median(), tmp_path)["model"]) == {"loss"}


def test_the_report_holds_what_it_promises(market: Market, tmp_path: Path) -> None:
    model, criterion = forecaster(market)
    report = report_on(market, model, criterion, tmp_path)
    assert report.pop("correction") == {}
    assert RunDir(str(tmp_path)).read_json("evaluation.json") == report
    assert report["windows"] == market.count("test")
    assert sum(row["samples"] for row in report["calibration"]) == report["windows"]
    covered = sum(row["samples"] * row["coverage_90"] for row in report["calibration"]) / report["windows"]
    assert covered == pytest.approx(report["model"]["coverage_90"])
    sigmas = [row["sigma_mean"] for row in report["calibration"]]
    assert sigmas == sorted(sigmas)
    constant = report["baselines"]["constant"]
    assert constant["model_gain_nll"] == pytest.approx(constant["nll"] - report["model"]["nll"])
    with np.load(tmp_path / "predictions.npz") as saved:
        assert set(saved) == {"row", "date", "ticker", "tickers", "target", "loss", "mu", "sigma", "nu"}
        np.testing.assert_array_equal(saved["row"], market.rows["test"])
        assert saved["tickers"][saved["ticker"][-1]] == "T5"
        assert saved["date"].dtype == np.dtype("datetime64[D]")


def test_an_overflowed_model_is_refused_and_leaves_no_report(market: Market, tmp_path: Path) -> None:
    model, criterion = forecaster(market)
    nn.init.constant_(model.get_submodule("model.head").weight, float("nan"))
    with pytest.raises(ValueError, match="loss on the test split is nan"):
        report_on(market, model, criterion, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_split_is_refused_by_name(market: Market) -> None:
    empty = Market(tickers=1, days=200)
    empty.rows["valid"] = empty.rows["valid"][:0]
    with pytest.raises(ValueError, match="the split 'valid' of the dataset has no samples"):
        validate(empty, *forecaster(empty))


@pytest.fixture(scope="module")
def judged(market: Market) -> Any:
    """Predictions of the test split to build reports from, with honest days and no baselines."""
    model, criterion = forecaster(market)
    predictions = forecasts(market, model, criterion, "test", 512)
    return predictions, market.dates(predictions.row)


def test_notes_follow_the_numbers(judged: Any) -> None:
    predictions, days = judged
    report = build_report(predictions, days, {}, horizon=5)
    said = "\n".join(report["notes"])
    assert "The mean forecast has no skill" in said
    assert "no baseline could be judged" in said
    assert "har_x could not be judged" in " ".join(report["gate"]["reasons"])


def test_a_mean_that_knows_the_future_is_called_a_leak(judged: Any) -> None:
    predictions, days = judged
    knowing = type(predictions)(
        **{name: getattr(predictions, name) for name in ("row", "target", "loss", "sigma", "nu")},
        mu=0.5 * predictions.target,
    )
    report = build_report(knowing, days, {}, horizon=5)
    assert any("Suspect leakage" in note for note in report["notes"])
    assert any("contain the future" in reason for reason in report["gate"]["reasons"])

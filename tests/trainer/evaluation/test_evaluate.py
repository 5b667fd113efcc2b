from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluate_ranks import CPU, be_rank, forecaster, judge_of
from market import Market
from scipy import stats
from torch import Tensor, nn
from worlds import FORKS, free_port

from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.data.sampler import spread_positions
from trainer.evaluation.evaluate import Evaluation, JudgeRequest
from trainer.evaluation.window_baselines import baseline_forecasts
from trainer.evaluation.window_judge import forecast_windows
from trainer.evaluation.window_report import Predictions, build_report
from trainer.rundir import RunDir

ALONE = World(RankFacts(), CPU, "gloo")


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


def run_world(size: int, folder: Path, samples: int) -> list[dict[str, Any]]:
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [FORKS.Process(target=be_rank, args=(folder, samples, world | {"RANK": str(rank)})) for rank in range(size)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def test_metrics_are_what_scipy_says(market: Market) -> None:
    model, criterion = forecaster(market)
    result, predictions = validate(market, model, criterion), forecasts(market, model, criterion)
    rows = market.end_rows("valid", np.arange(market.count("valid")))
    windows, target = market.gather(rows)
    with torch.no_grad():
        predictive = criterion.predictive(model.eval()(windows))
    mu, sigma, nu = (part.double().numpy() for part in (predictive.mu, predictive.sigma, predictive.nu))
    y = target.double().numpy()
    nll = -stats.t.logpdf(y, nu, mu, sigma)
    levels = {q: stats.t.ppf(q, nu, mu, sigma) for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
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


@pytest.mark.slow
@pytest.mark.parametrize(("size", "samples"), [(2, 401), (3, 2)])
def test_every_sample_counts_once_whatever_the_world(size: int, samples: int, market: Market, tmp_path: Path) -> None:
    for name in ("alone", "many"):
        (tmp_path / name).mkdir()
    [alone] = run_world(1, tmp_path / "alone", samples)
    ranks = run_world(size, tmp_path / "many", samples)
    for rank in ranks:
        assert rank["rows"] == alone["rows"] == market.rows["valid"][:samples].tolist()
        assert rank["evaluation"]["samples"] == samples
        assert rank["evaluation"]["loss"] == pytest.approx(alone["evaluation"]["loss"], rel=1e-6)
        assert rank["evaluation"]["metrics"] == pytest.approx(alone["evaluation"]["metrics"], rel=1e-6)
        assert rank["report"] == ranks[0]["report"]
        assert rank["report"]["model"] == pytest.approx(alone["report"]["model"], rel=1e-4)
    written = RunDir(str(tmp_path / "many" / "run")).read_json("evaluation.json")
    assert {**written, "correction": {}} == ranks[0]["report"]


@pytest.mark.slow
def test_ranks_share_the_last_evaluation_and_it_stays_the_same(market: Market, tmp_path: Path) -> None:
    """Bit for bit."""
    judged = []
    for size in (1, 2, 3):
        (tmp_path / str(size)).mkdir()
        ranks = run_world(size, tmp_path / str(size), 401)
        with np.load(tmp_path / str(size) / "run" / "predictions.npz") as saved:
            judged.append((dict(saved), ranks[0]["report"]))
    (alone, report), *others = judged
    assert set(report["baselines"]) == set(baseline_forecasts(market, "test"))
    for forecasts, other in others:
        for name, values in alone.items():
            np.testing.assert_array_equal(forecasts[name], values, err_msg=name)
        assert other == report


def test_of_a_large_split_all_counts_and_a_part_is_kept(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    model, criterion = forecaster(market)
    loss, whole = forecast_windows(criterion, market, "valid", ask(model, 64))  # type: ignore[arg-type]
    for module in ("evaluate", "window_judge"):
        monkeypatch.setattr(f"trainer.evaluation.{module}.spread_positions", partial(spread_positions, most=101))
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


def test_a_point_loss_is_judged_by_its_squared_error(market: Market, tmp_path: Path) -> None:
    model, criterion = forecaster(market, "mse")
    assert set(validate(market, model, criterion).metrics) == {"mse_to_zero"}
    report = report_on(market, model, criterion, tmp_path)
    assert "nll" not in report["model"]
    assert report["calibration"] == []
    assert not report["gate"]["passed"]
    assert "nll" in report["baselines"]["har"]


def test_a_loss_that_explains_nothing_is_judged_by_itself(market: Market, tmp_path: Path) -> None:
    model, _ = forecaster(market, "mse")
    assert validate(market, model, Median()).metrics == {}
    report = report_on(market, model, Median(), tmp_path)
    assert set(report["model"]) == {"loss"}


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

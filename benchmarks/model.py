"""Measure how much better the default model forecasts than ridge regression, walking forward by year.

Run `python -m benchmarks.model`. For each test year, a dataset of the bundled prices up to the end of that year is
built; the model is trained as `make run` does, on one rank, on all but the two years before the test year, which choose
the epoch; and ridge and the other baselines are fitted again on the same days. The windows of all test years are judged
together. Years that were looked at while the model was chosen say nothing of its quality: those up to 2013.

    nll_gain_vs_ridge        nats per window by which the model's likelihood is better than that of ridge on the same
                             features and windows, fitted as often
    t_vs_ridge               the Newey-West t-statistic of that over days
    nll_gain_vs_ridge_of_8   the same against ridge on the first eight features, those of a stock's and the index's own
                             past
    t_vs_ridge_of_8
    nll_gain_vs_ridge_calibrated    the same against ridge whose factor of the scale and degrees of freedom are fitted
                             on the validation years, as the model's are, and not on the years that it was fitted to
    t_vs_ridge_calibrated
    coverage_90              the share of outcomes inside the 90 % interval
    canaries                 whether the leakage checks passed on the first year's dataset: shuffled labels teach
                             nothing, and a planted label is caught
    by_year                  these three gains
    train_seconds            of each year's training, evaluation left out

The result is written to ``benchmarks/results/model.json`` with --save.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.host import CALENDAR, note, tell
from benchmarks.year_scores import YearScores, gain_over, judge_years, score_predictions
from dtrain_dagster.data.leakage_check import run_leakage_checks
from dtrain_dagster.data.prices import PricesRef, write_prices
from dtrain_dagster.data.sharding import DatasetParams
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.data.year_split import YearSplit, build_year
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.data.shards import DataShardManager
from trainer.engine.run_job import run_job
from trainer.evaluation.window_baselines import BaselineForecast, baseline_forecasts, fit_student_t
from trainer.evaluation.window_report import Predictions, judge_baseline, judge_baselines
from trainer.exit_codes import DONE
from trainer.model.allowed_factories import usual_parts
from trainer.rundir import PREDICTIONS, RESULT, RunDir
from trainer.spec import WINDOWS

YEARS = (2014, 2022)
OWN_FEATURES = 8
"""Features of a stock's own past and the index's, the first ones: what ridge had before there were others."""
OF_OWN, CALIBRATED = f"ridge_of_{OWN_FEATURES}", "ridge_calibrated"
AGAINST = ("ridge", OF_OWN, CALIBRATED)
"""What the model is compared with, besides the baselines of its report."""


class FewerFeatures:
    """A dataset of which only the first features are seen."""

    def __init__(self, shards: DataShardManager, count: int) -> None:
        self._shards, self._count = shards, count
        spec = shards.spec
        parts = {name: getattr(spec, name)[:count] for name in ("features", "feature_mean", "feature_std")}
        self.spec = replace(spec, **parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shards, name)

    def gather(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return windows of the first features, and targets."""
        windows, target = self._shards.gather(rows)
        return windows[..., : self._count], target


def year_job(folder: Path, dataset: DatasetRef, seed: int) -> JobConfig:
    """Return the job of a year: the default model and settings, with the global batch of three nodes on one rank."""
    usual, (model, loss) = DistributedTrainingConfig(), usual_parts(WINDOWS, None)
    training = replace(
        usual, world_size=1, batch_size_per_gpu=usual.global_batch_size, gradient_accumulation_steps=1, seed=seed,
        threads_per_rank=1,
    )  # fmt: skip
    return JobConfig(
        job_id=folder.name, run_dir=str(folder), dataset=dataset, model=FactoryConfig(factory=model),
        loss=FactoryConfig(factory=loss), training=training,
        tracking=TrackingConfig(tensorboard=False),
    )  # fmt: skip


def walk_year(prices: PricesRef, home: Path, year: int, seed: int) -> tuple[YearScores, DataShardManager, float]:
    """Train and judge a test year; return its daily figures, its data, and the seconds of the training."""
    built = build_year(prices, str(home / "storage"), YearSplit(year=year), DatasetParams(), CALENDAR)
    job = year_job(home / f"year-{year}", DatasetRef(uri=built.uri, dataset_id=built.dataset_id), seed)
    rundir = RunDir(job.run_dir)
    rundir.write_job(job)
    began = time.monotonic()
    code = run_job(job)
    seconds = time.monotonic() - began
    if code != DONE:
        raise RuntimeError(f"the training of {year} ended with code {code}: {rundir.read_json(RESULT)}")
    shards = DataShardManager(built.uri)
    with np.load(Path(job.run_dir) / PREDICTIONS) as stored:
        names = ("row", "target", "loss", "mu", "sigma", "nu")
        found = score_predictions(year, Predictions(*(stored[name] for name in names)), shards)
    fewer: Any = FewerFeatures(shards, OWN_FEATURES)
    nll = judge_baselines(fewer, "test")["ridge"].nll
    assert nll is not None
    rows = shards.end_rows("test", np.arange(shards.count("test")))
    days, place = np.unique(shards.dates(rows), return_inverse=True)
    assert np.array_equal(days.astype("datetime64[D]"), found.days)
    daily = {
        name: np.bincount(place, weights=values) / np.bincount(place)
        for name, values in ((OF_OWN, nll), (CALIBRATED, calibrated_ridge(shards)))
    }
    return replace(found, baselines={**found.baselines, **daily}), shards, seconds


def calibrated_ridge(shards: DataShardManager) -> NDArray[np.float64]:
    """Return the NLL of each test window by ridge whose distribution is fitted on the validation split."""

    def forecast(split: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        rows = shards.end_rows(split, np.arange(shards.count(split)))
        sigma = baseline_forecasts(shards, split)["ridge"].sigma
        assert sigma is not None
        return sigma, shards.column(shards.spec.target, rows).astype(np.float64)

    (sigma, target), (of_test, outcomes) = forecast("valid"), forecast("test")
    factor, nu = fit_student_t(target / sigma)
    nll = judge_baseline(BaselineForecast(np.zeros(len(of_test)), factor * of_test, nu), outcomes).nll
    assert nll is not None
    return nll


def measure(years: Sequence[int], seed: int) -> dict[str, Any]:
    """Return the figures over these years."""
    scores: list[YearScores] = []
    seconds: dict[str, float] = {}
    canaries: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["DTRAIN_CACHE"] = str(home / "cache")
        prices = write_prices(price_source("sp500_panel"), str(home / "storage"))
        for year in years:
            found, shards, took = walk_year(prices, home, year, seed)
            scores.append(found)
            seconds[str(year)] = round(took, 1)
            told = [
                f"{name} {gain_over(found.nll, found.baselines[name], found.windows, 5).nats:+.4f}" for name in AGAINST
            ]
            note(f"{year}: {', '.join(told)} ({took:.0f} s)")
            if not canaries:
                checked = run_leakage_checks(shards)
                canaries = {"passed": checked["passed"], "reasons": list(checked["reasons"])}
    report = judge_years(scores)
    together = report["all"]
    gains = together["gains"]
    return {
        "years": [years[0], years[-1]],
        "seed": seed,
        "windows": together["windows"],
        "nll": round(together["nll"], 5),
        **{f"nll_{name}": round(value, 5) for name, value in together["baselines"].items()},
        **{f"nll_gain_vs_{name}": round(gains[name]["nats"], 5) for name in (*AGAINST, "har_x", "ewma")},
        **{f"t_vs_{name}": round(gains[name]["t"], 2) for name in (*AGAINST, "har_x", "ewma")},
        "coverage_90": round(together["coverage_90"], 4),
        "canaries": canaries,
        "by_year": {
            year: [round(row["gains"][name]["nats"], 5) for name in AGAINST] for year, row in report["by_year"].items()
        },
        "by_regime": {
            name: [round(row["gains"][other]["nats"], 5) for other in AGAINST]
            for name, row in report["by_regime"].items()
        },
        "train_seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--first", type=int, default=YEARS[0], help="first test year")
    parser.add_argument("--last", type=int, default=YEARS[1], help="last test year")
    parser.add_argument("--seed", type=int, default=0, help="of first weights and the order of samples")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/model.json")
    options = parser.parse_args(arguments)
    tell("model", measure(range(options.first, options.last + 1), options.seed), options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Test with known answers whether evaluation notices a leak: ``python -m dtrain_dagster.data.leakage_check --dataset
URI``.

Three ridge regressions on whole windows, of the return and of its volatility, each judged on the validation split:

- *shuffled*: the training labels belong to other windows. What is learned must not beat the unconditional
  distribution; if it does, labels reach the model by another way than through the data.
- *planted*: the last day of one feature is replaced by the label. `trainer.evaluation.gate.suspect_leak` must notice.
- *control*: the data as they are. They must not raise the alarm.

The command prints one JSON line. Its exit code is 0 if the verdict could be computed, whatever it is, and 2 for
unusable data.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError
from trainer.data.sampler import spread_positions
from trainer.data.shards import DataShardManager
from trainer.evaluation import window_scores as scores
from trainer.evaluation.gate import CHANCE_T, suspect_leak
from trainer.evaluation.window_baselines import BaselineForecast, fit_student_t
from trainer.evaluation.window_report import score_forecast
from trainer.model.losses import ReturnAndVolatility

MOST_WINDOWS, MOST_NUMBERS = 10_000, 1 << 24
"""The most windows of a split, and the most numbers in them, 64 MB."""
PENALTY = 0.1
"""Of ridge, per training window, for standardised features and labels. With less, shuffled labels are all noise."""
UNNOTICED = "a label planted among the features went unnoticed: the leak alarm cannot be trusted on so little data"
"""What says nothing against the data: a dataset of few days has too few to tell a leak from chance."""
MARGIN_NLL = 0.02
"""By how much shuffled labels may beat the best constant distribution, in nats per sample; of few windows more, by
chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakageTrial:
    """What a regression reaches on the validation split: the skill is that of its mean forecast in each half."""

    nll: float
    gain_t: float | None = None
    """The t-statistic over days of how much lower that is than the constant distribution's; None: too few days."""
    halves: tuple[dict[str, float | None], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Windows of a split, spread over it."""

    features: NDArray[np.float32]
    """(n, window * features), standardised, the last day last."""
    labels: NDArray[np.float64]
    """(n, 2): the return over the horizon, and its log realised volatility."""
    days: NDArray[np.datetime64]


def judge_leakage(
    constant_nll: float, shuffled: LeakageTrial, planted: LeakageTrial, control: LeakageTrial
) -> dict[str, list[str]]:
    """Return, for each check, the reasons for which it failed, none if it passed; ``constant_nll`` is the unconditional
    distribution's on the same windows."""
    shuffling, alarm = [], []
    gain = constant_nll - shuffled.nll
    if gain > MARGIN_NLL and (shuffled.gain_t is None or shuffled.gain_t > CHANCE_T):
        shuffling.append(
            f"a model trained on shuffled labels beats the unconditional distribution by {gain:.4f} nats "
            f"(more than {MARGIN_NLL}, and beyond chance): labels reach it by some way other than the data"
        )
    if not suspect_leak(planted.halves):
        alarm.append(UNNOTICED)
    leak = suspect_leak(control.halves)
    if leak:
        alarm.append(f"on the unchanged data, {leak}")
    return {"shuffled_labels_teach_nothing": shuffling, "planted_leak_is_caught": alarm}


def read_windows(shards: DataShardManager, split: str) -> Windows:
    """Return windows of a split; at most `MOST_WINDOWS`."""
    spec = shards.spec
    shards.add_target(ReturnAndVolatility.second_target)  # refuses a dataset that does not have it
    most = min(MOST_WINDOWS, MOST_NUMBERS // (spec.window * len(spec.features)))
    rows = shards.end_rows(split, spread_positions(shards.count(split), most))
    mean, std = (np.asarray(part, dtype=np.float32) for part in (spec.feature_mean, spec.feature_std))
    std[std == 0] = 1
    features = (shards.gather(rows)[0].cpu().numpy() - mean) / std
    labels = np.column_stack([shards.column(name, rows) for name in (spec.target, "target_log_rv")])
    days = shards.dates(rows).astype("datetime64[D]")
    return Windows(features=features.reshape(len(rows), -1), labels=labels.astype(np.float64), days=days)


def shuffle_labels(train: Windows, seed: int) -> Windows:
    """Return the windows with the labels of others. Pure."""
    return replace(train, labels=train.labels[np.random.default_rng(seed).permutation(len(train.labels))])


def plant_leak(windows: Windows, features: int) -> Windows:
    """Return the windows with the return ahead, standardised, as the last day of the first feature. Pure."""
    returns, planted = windows.labels[:, 0], windows.features.copy()
    planted[:, -features] = (returns - returns.mean()) / returns.std()
    return replace(windows, features=planted)


def run_trial(train: Windows, valid: Windows, horizon: int, constant: NDArray[np.float64]) -> LeakageTrial:
    """Fit ridge to the training windows, and judge it on the validation windows. ``constant``: `constant_nll`."""
    centre = train.labels.mean(axis=0)
    weights = ridge(train.features, train.labels - centre)
    said, forecast = (part.features @ weights + centre for part in (train, valid))
    volatility = np.exp(said[:, 1])
    floor = np.quantile(volatility, 1e-3)  # a dead week has no volatility, and no likelihood survives that
    factor, nu = fit_student_t(train.labels[:, 0] / np.maximum(volatility, floor))
    mu, sigma = forecast[:, 0], factor * np.maximum(np.exp(forecast[:, 1]), floor)
    outcome = valid.labels[:, 0]
    skill = tuple(
        scores.mean_skill(mu[part], outcome[part], valid.days[part], horizon)
        for part in scores.halves(valid.days)
        if part.any()
    )
    nll, lag = _nll(sigma, nu, outcome), scores.newey_west_lag(len(np.unique(valid.days)), horizon)
    gain_t = scores.newey_west_t(scores.daily_means(constant - nll, valid.days), lag)
    return LeakageTrial(nll=float(nll.mean()), gain_t=gain_t, halves=skill)


def ridge(features: NDArray[np.float32], labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights (numbers of a window, labels). The system that is solved is the smaller one, of the numbers of
    a window or of the windows: long windows are fewer (`MOST_NUMBERS`)."""
    count, size = features.shape
    if size > count:
        gram = (features @ features.T).astype(np.float64) / count
        return features.T.astype(np.float64) @ np.linalg.solve(gram + PENALTY * np.eye(count), labels / count)
    gram = (features.T @ features).astype(np.float64) / count
    return np.linalg.solve(gram + PENALTY * np.eye(size), features.T.astype(np.float64) @ labels / count)


def constant_nll(valid: Windows) -> NDArray[np.float64]:
    """Return the NLL of each validation window by the one distribution that fits its labels best: a model that only
    guessed a calmer or more volatile market than it saw in training cannot beat it by luck."""
    outcome = valid.labels[:, 0]
    sigma, nu = fit_student_t(outcome)
    return _nll(np.full(len(outcome), sigma), nu, outcome)


def _nll(sigma: NDArray[np.float64], nu: float, outcome: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the NLL of each outcome by Student-t distributions of mean zero: a linear model of a few windows gives
    means that are worse than none."""
    forecast = BaselineForecast(np.zeros(len(outcome)), sigma, nu)
    return np.asarray(score_forecast(forecast.predictive, outcome)["nll"], dtype=np.float64)


def run_leakage_checks(shards: DataShardManager, seed: int = 0) -> dict[str, Any]:
    """Run all three trials and return them with the verdict, ready for JSON."""
    started, features, horizon = time.monotonic(), len(shards.spec.features), shards.spec.horizon
    train, valid = (read_windows(shards, split) for split in ("train", "valid"))
    constant = constant_nll(valid)
    trials = {
        "shuffled": run_trial(shuffle_labels(train, seed), valid, horizon, constant),
        "planted": run_trial(plant_leak(train, features), plant_leak(valid, features), horizon, constant),
        "control": run_trial(train, valid, horizon, constant),
    }
    checks = judge_leakage(float(constant.mean()), **trials)
    return {
        "checks": checks,
        "warnings": [name for name, reasons in checks.items() if reasons == [UNNOTICED]],
        "constant_nll": float(constant.mean()),
        "seconds": round(time.monotonic() - started, 3),
        "trials": {name: asdict(trial) for name, trial in trials.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dtrain_dagster.data.leakage_check", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--dataset", required=True, help="folder of manifest.json: a path or any fsspec address")
    options = parser.parse_args(arguments)
    try:
        result = run_leakage_checks(DataShardManager(options.dataset))
    except (ConfigError, ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

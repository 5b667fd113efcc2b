"""The daily figures of one test year, from a model's forecasts and the year's dataset.

Baselines are fitted here, on the training days of the same dataset, and of what nodes wrote only the predictions are
believed. What is made of several years is `dtrain_dagster.registry.walk_forward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dtrain_dagster.registry.evaluated import EvaluationError, stored_predictions
from dtrain_dagster.registry.walk_forward import YearScores, score_year, turbulent_days
from trainer.data.manifest import SPLITS
from trainer.data.sampler import spread_positions
from trainer.evaluation.window_report import JudgedBaseline, Predictions, judge_baselines, score_forecast
from trainer.rundir import PREDICTIONS, RunDir

if TYPE_CHECKING:
    from trainer.data.shards import DataShardManager

VOLATILITY = "index_log_rv_22"
"""The feature by which days are calm or turbulent: the index's volatility over the last 22 days."""


def score_predictions(
    year: int,
    predictions: Predictions,
    shards: DataShardManager,
    baselines: Mapping[str, JudgedBaseline] | None = None,
) -> YearScores:
    """Return the daily figures of forecasts for the test split of the year's dataset. ``baselines``: those of the same
    split; None: they are fitted now. Raise ValueError where the forecasts are no distribution, which alone has a
    likelihood."""
    target = shards.column(shards.spec.target, predictions.row).astype(np.float64)
    own = score_forecast(predictions.predictive, target)
    if not own:
        raise ValueError("the loss predicts no distribution, so years cannot be compared by likelihood")
    if baselines is None:
        baselines = judge_baselines(shards, "test")
    return score_year(
        year,
        shards.dates(predictions.row).astype("datetime64[D]"),
        own["nll"],
        own["coverage_90"],
        {name: item.nll for name, item in baselines.items() if item.nll is not None},
        shards.spec.horizon,
        market_regimes(shards),
    )


def market_regimes(shards: DataShardManager) -> dict[np.datetime64, bool] | None:
    """Return for each day on which a window of any split ends whether it was turbulent (`turbulent_days`); None for a
    dataset without the index's volatility."""
    if VOLATILITY not in shards.spec.features:
        return None
    parts = (shards.end_rows(split, spread_positions(shards.count(split))) for split in SPLITS)
    rows = np.concatenate(list(parts))
    days, first = np.unique(shards.dates(rows).astype("datetime64[D]"), return_index=True)
    flags = turbulent_days(shards.column(VOLATILITY, rows[first]).astype(np.float64))
    return dict(zip(days, flags.tolist(), strict=True))


def score_run(year: int, rundir: RunDir, dataset_uri: str, dataset_id: str, cache_dir: str | None = None) -> YearScores:
    """Return the daily figures of the run directory's predictions for the test split of this dataset. Raise
    `EvaluationError` for predictions of another dataset or without a distribution, `AnswerError` for a file that holds
    none."""
    from trainer.data.shards import DataShardManager

    shards = DataShardManager(dataset_uri, cache_dir, dataset_id)
    try:
        return score_predictions(year, stored_predictions(rundir, shards), shards)
    except (ArithmeticError, RuntimeError) as error:
        raise EvaluationError(f"{rundir.uri}/{PREDICTIONS} cannot be judged ({error}): train again") from error

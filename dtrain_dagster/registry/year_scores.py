"""The daily figures of a test year, from the predictions that nodes wrote and the year's dataset.

Only the predictions are the nodes' word: targets, likelihoods and baselines are computed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtrain_dagster.registry.evaluated import stored_predictions
from trainer.rundir import PREDICTIONS, RunDir

if TYPE_CHECKING:
    from trainer.evaluation.walk_forward import YearScores


def score_run(year: int, rundir: RunDir, dataset_uri: str, dataset_id: str, cache_dir: str | None = None) -> YearScores:
    """Return the daily figures of the run directory's predictions for the test split of this dataset. Raise
    `EvaluationError` for predictions of another dataset or without a distribution, `AnswerError` for a file that holds
    none."""
    from dtrain_dagster.registry.evaluated import EvaluationError
    from trainer.data.shards import DataShardManager
    from trainer.evaluation.year_scores import score_predictions

    shards = DataShardManager(dataset_uri, cache_dir, dataset_id)
    try:
        return score_predictions(year, stored_predictions(rundir, shards), shards)
    except (ArithmeticError, RuntimeError) as error:
        raise EvaluationError(f"{rundir.uri}/{PREDICTIONS} cannot be judged ({error}): train again") from error

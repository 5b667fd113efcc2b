"""The check that ``evaluation.json`` follows from the run directory's predictions and the dataset's own targets.

Nodes write both files. A change to one of them is found here, before the gate reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.smoke_test import read_predictions
from trainer.config import JobConfig
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir

if TYPE_CHECKING:
    from trainer.data.shards import DataShardManager
    from trainer.evaluation.window_report import Predictions

FIGURES = ("windows", "days", "first_date", "last_date", "model", "halves", "baselines")
"""The figures that the gate and the model card read."""
TOLERANCE, LEAST = 1e-4, 1e-6
"""The relative and the absolute tolerance: the same arithmetic in double precision, perhaps on another kind of
processor."""
RIDGE = "baselines.ridge"
RIDGE_LEAST, RIDGE_LEAST_T = 1e-5, 0.01
"""The absolute tolerances of ridge's figures and of its t-statistics: it multiplies windows in single precision, and a
gain near zero, as over a model that is as good, has few digits left."""


class EvaluationError(ValueError):
    """A contradiction between a node's report and its model's predictions. The message names the figure."""


def refuse_false_evaluation(
    rundir: RunDir, job: JobConfig, evaluation: Mapping[str, Any], cache_dir: str | None = None
) -> None:
    """Raise `EvaluationError` where the report's figures differ from those that the predictions beside it give on the
    ordered job's dataset; raise `AnswerError` for a file that holds no predictions."""
    import numpy as np

    from trainer.data.shards import DataShardManager
    from trainer.evaluation.window_report import build_report, judge_baselines

    shards = DataShardManager(job.dataset.uri, cache_dir, job.dataset.dataset_id)
    predictions = stored_predictions(rundir, shards)
    days = shards.dates(predictions.row).astype("datetime64[D]")
    try:
        with np.errstate(all="ignore"):
            found = build_report(predictions, days, judge_baselines(shards, "test"), shards.spec.horizon)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise EvaluationError(f"{rundir.uri}/{PREDICTIONS} cannot be judged ({error}): train again") from error
    for name in FIGURES:
        _compare(rundir, name, evaluation.get(name), found[name])


def stored_predictions(rundir: RunDir, shards: DataShardManager) -> Predictions:
    """Return the predictions that nodes wrote, with the dataset's own targets. Raise `EvaluationError` where they are
    not of its test split, `AnswerError` for a file that holds none."""
    import numpy as np

    from trainer.data.sampler import spread_positions
    from trainer.evaluation.window_report import Predictions

    rows = shards.end_rows("test", spread_positions(shards.count("test")))
    stored = read_predictions(rundir, ("row", "loss", "mu", "sigma", "nu"))
    if not np.array_equal(stored["row"], rows):
        raise EvaluationError(f"{rundir.uri}/{PREDICTIONS} is not of this dataset's test split: train again")
    loss, mu, sigma, nu = (np.array(stored[name], dtype=np.float64) for name in ("loss", "mu", "sigma", "nu"))
    target = shards.column(shards.spec.target, rows).astype(np.float64)
    return Predictions(rows, target, loss, mu, sigma, nu)


def _compare(rundir: RunDir, where: str, said: Any, found: Any) -> None:
    if isinstance(said, Mapping) and isinstance(found, Mapping):
        for name in {**found, **said}:
            _compare(rundir, f"{where}.{name}", said.get(name), found.get(name))
    elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        for number, (one, other) in enumerate(zip(said, found, strict=True)):
            _compare(rundir, f"{where}.{number}", one, other)
    elif not _is_same(where, said, found):
        raise EvaluationError(
            f"{rundir.uri}/{EVALUATION} says {where} = {str(said)[:60]}, and from {PREDICTIONS} and the dataset "
            f"follows {str(found)[:60]}: one of the two files was changed after the training; nothing is "
            "registered. Train again, and check who can write there"
        )


def _is_same(where: str, said: Any, found: Any) -> bool:
    if isinstance(said, int | float) and isinstance(found, int | float):
        least = LEAST
        if where.startswith(RIDGE):
            least = RIDGE_LEAST_T if where.endswith("_t") else RIDGE_LEAST
        return math.isclose(said, found, rel_tol=TOLERANCE, abs_tol=least)
    return bool(said == found)

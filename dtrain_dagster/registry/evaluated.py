"""The figures that the gate reads, as they come to here: a node's report of its own model is not believed.

Of windows they follow from the predictions in the run directory and the dataset's own targets. Of rows the weights are
asked again, in a process of their own (`run_model.RunModel.predict`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.run_model import ASK_SECONDS, RunModel, load_run_model
from dtrain_dagster.registry.smoke_test import open_data, stored_predictions
from trainer.data.sampler import MOST_JUDGED, spread_positions
from trainer.evaluation.gate import gate_document, score_of
from trainer.evaluation.row_scores import RowScoring
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir
from trainer.spec import ROWS, RowSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.data.row_data import RowData
    from trainer.data.shards import DataShardManager

FIGURES = ("windows", "days", "first_date", "last_date", "model", "halves", "baselines")
"""The figures of windows that the gate and the model card read."""
TOLERANCE, LEAST = 1e-3, 1e-6
"""The relative and the absolute tolerance of the model's score: other kernels in single precision. The absolute one of
an error of numbers is in deviations of the target."""
ROWS_PER_SECOND = 500
"""Rows that a model answers in a second at least."""
MOST_VALUES = 1 << 25
"""The most numbers that are asked about at once."""


class EvaluationError(ValueError):
    """A contradiction between a node's report and its model. The message names the figure."""


def judge_again(
    rundir: RunDir, order: Order | None, evaluation: Mapping[str, Any], cache_dir: str | None = None
) -> dict[str, Any]:
    """Return a node's report with the figures of model and baselines as they come to here, and the verdict that
    follows. Raise `EvaluationError` where it says another score of the model, `AnswerError` for predictions that are
    none, and `run_model.RunModelError` for a model that does not answer."""
    own = load_run_model(rundir, order)
    data: Any = open_data(own, cache_dir)
    is_table = isinstance(own.spec, RowSpec)
    found = _judge_rows(own, data, evaluation) if is_table else _judge_windows(rundir, data, evaluation)
    score = score_of(found)
    # Of a larger split of rows the node has judged all, and these are a part.
    if score is not None and not (is_table and data.count("test") > MOST_JUDGED):
        given, least = evaluation.get("model"), LEAST * (own.spec.target_std if score == "rmse" else 1.0)
        said, figure = given.get(score) if isinstance(given, Mapping) else None, found["model"][score]
        if not isinstance(said, int | float) or not math.isclose(said, figure, rel_tol=TOLERANCE, abs_tol=least):
            raise EvaluationError(
                f"{rundir.uri}/{EVALUATION} says model.{score} = {str(said)[:60]}, and from the model and the dataset "
                f"follows {str(figure)[:60]}: one of the files was changed after the training; nothing is registered. "
                "Train again, and check who can write there"
            )
    return found | {"gate": gate_document(found)}


def _judge_windows(rundir: RunDir, shards: DataShardManager, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    from trainer.evaluation.window_report import Predictions, build_report, judge_baselines

    rows = shards.end_rows("test", spread_positions(shards.count("test")))
    stored = stored_predictions(rundir, shards, ("loss", "mu", "sigma", "nu"))
    target = shards.column(shards.spec.target, rows).astype(np.float64)  # the dataset's own, whatever nodes wrote
    predictions = Predictions(rows, target, *(values.astype(np.float64) for values in stored.values()))
    days = shards.dates(predictions.row).astype("datetime64[D]")
    try:
        with np.errstate(all="ignore"):
            found = build_report(predictions, days, judge_baselines(shards, "test"), shards.spec.horizon)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise EvaluationError(f"{rundir.uri}/{PREDICTIONS} cannot be judged ({error}): train again") from error
    return {**evaluation, **{name: found[name] for name in FIGURES}}


def _judge_rows(own: RunModel, data: RowData, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with the figures of model, baselines and canary as they come to here. Other figures of the
    model stay the node's."""
    import numpy as np

    from trainer.evaluation.evaluate import SharedWork
    from trainer.evaluation.row_comparison import compare_rows

    scoring, positions = RowScoring(data.spec), spread_positions(data.count("test"))
    seconds = ASK_SECONDS + len(positions) / ROWS_PER_SECOND
    forecast = answers(partial(own.predict, seconds=seconds), data, positions)
    found: dict[str, Any] = {**evaluation, "kind": ROWS, "task": data.spec.task}
    scores, figures = np.full(len(positions), math.nan), dict.fromkeys(("log_loss", "rmse"))
    if forecast is not None:
        truth = data.samples("test", positions)[1].numpy()
        scores, figures = scoring.score(forecast, truth), scoring.figures(scoring.sums(forecast, truth))
    found["model"] = {**evaluation["model"], **figures}
    baselines, canary = compare_rows(data, scores, SharedWork())
    return found | {"baselines": baselines, "canaries": {"shuffled_targets": canary}}


def answers(
    predict: Callable[[NDArray[np.float64]], Mapping[str, NDArray[np.float64]]],
    data: RowData,
    positions: NDArray[np.int64],
) -> NDArray[np.float64] | None:
    """Return what a model forecasts for rows of the test split: numbers (n,), or the probabilities of classes (n, C);
    None for a model whose loss knows neither."""
    import numpy as np

    classes = len(data.spec.classes)
    names = [f"probability_{code}" for code in range(classes)] if classes else ["prediction"]
    size = max(1, MOST_VALUES // len(data.spec.features))
    parts = []
    for start in range(0, len(positions), size):
        columns = predict(data.original("test", positions[start : start + size]))
        if any(name not in columns for name in names):
            return None
        parts.append(np.column_stack([columns[name] for name in names]))
    forecast = np.concatenate(parts)
    return forecast if classes else forecast[:, 0]

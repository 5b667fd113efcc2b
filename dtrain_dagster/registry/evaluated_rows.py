"""A model of a table, asked again on its test rows: the gate reads what follows from the weights, not a node's report.

The weights answer in a process of their own (`run_model.RunModel.predict`), and the baselines are fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.evaluated import EvaluationError
from dtrain_dagster.registry.run_model import ASK_SECONDS, load_run_model
from trainer.evaluation.gate import gate_document
from trainer.rundir import EVALUATION, RunDir
from trainer.spec import ROWS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.data.row_data import RowData

TOLERANCE = 1e-3
"""The relative tolerance of a node's figure: other kernels in single precision."""
LEAST = 1e-6
"""Differences of log-loss that are none, for the same reason; and of the error of numbers, in deviations of the
target."""
ROWS_PER_SECOND = 500
"""Rows that a model answers in a second at least."""
MOST_VALUES = 1 << 25
"""The most numbers that are asked about at once."""


def judge_rows(
    rundir: RunDir, order: Order | None, evaluation: Mapping[str, Any], cache_dir: str | None = None
) -> dict[str, Any]:
    """Return a node's report of a model of rows with the figures of model, baselines and canary as they come to here,
    and the verdict that follows. Other figures of the model stay the node's. Raise `EvaluationError` where it says
    another log-loss or error of a test split that is asked about whole, and `run_model.RunModelError` for a model that
    does not answer."""
    import numpy as np

    from trainer.data.row_data import RowData
    from trainer.data.sampler import spread_positions
    from trainer.evaluation.evaluate import SharedWork
    from trainer.evaluation.row_comparison import compare_rows
    from trainer.evaluation.row_scores import RowScoring

    own = load_run_model(rundir, order)
    data = RowData(own.job.dataset.uri, cache_dir, own.spec.dataset_id)
    scoring, positions = RowScoring(data.spec), spread_positions(data.count("test"))
    seconds = ASK_SECONDS + len(positions) / ROWS_PER_SECOND
    forecast = answers(partial(own.predict, seconds=seconds), data, positions)
    found: dict[str, Any] = {**evaluation, "kind": ROWS, "task": data.spec.task}
    scores, figures = np.full(len(positions), math.nan), {}
    if forecast is not None:
        truth = data.samples("test", positions)[1].numpy()
        scores = scoring.score(forecast, truth)
        figures = scoring.figures(scoring.sums(forecast, truth))
        found["model"] = {**evaluation["model"], **figures}
    if len(positions) == data.count("test"):  # of a larger split the node has judged all, and these are a part
        score = "rmse" if scoring.is_number else "log_loss"
        least = LEAST * data.spec.target_std  # 1 for classes
        _refuse_difference(rundir, score, evaluation["model"].get(score), figures.get(score), least)
    baselines, canary = compare_rows(data, scores, SharedWork())
    found |= {"baselines": baselines, "canaries": {"shuffled_targets": canary}}
    return found | {"gate": gate_document(found)}


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


def _refuse_difference(rundir: RunDir, score: str, said: float | None, found: float | None, least: float) -> None:
    if said is None or found is None:
        is_same = said is found
    else:
        is_same = math.isclose(said, found, rel_tol=TOLERANCE, abs_tol=least)
    if not is_same:
        raise EvaluationError(
            f"{rundir.uri}/{EVALUATION} says model.{score} = {str(said)[:60]}, but the weights beside it give "
            f"{str(found)[:60]} on the dataset's test rows: one of them was changed after the training; nothing is "
            "registered. Train again, and check who can write there"
        )

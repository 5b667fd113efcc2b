"""A model of a table, asked again on its test rows: the gate reads what follows from the weights, not a node's report.

The weights answer in a process of their own (`run_model.RunModel.predict`), and the baselines are fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dtrain_dagster.jobs.orders import Order
from dtrain_dagster.registry.evaluated import EvaluationError
from dtrain_dagster.registry.run_model import load_run_model
from trainer.evaluation.gate import gate_document
from trainer.rundir import EVALUATION, RunDir
from trainer.spec import ROWS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trainer.data.row_data import RowData

TOLERANCE = 1e-3
"""The relative tolerance of a node's figure: other kernels in single precision."""
MOST_VALUES = 1 << 26
"""The most numbers that are asked about at once."""


def judge_rows(
    rundir: RunDir, order: Order | None, evaluation: Mapping[str, Any], cache_dir: str | None = None
) -> dict[str, Any]:
    """Return a node's report of a model of rows with the figures of model, baselines and canary as they come to here,
    and the verdict that follows. Raise `EvaluationError` where the node says another figure of the model, and
    `run_model.RunModelError` for a model that does not answer."""
    import numpy as np

    from trainer.data.row_data import RowData
    from trainer.data.sampler import spread_positions
    from trainer.evaluation.evaluate import EVAL_BATCH
    from trainer.evaluation.row_comparison import RowComparison, RowScoring
    from trainer.evaluation.shared_work import SharedWork

    own = load_run_model(rundir, order)
    data = RowData(own.job.dataset.uri, cache_dir, own.spec.dataset_id)
    scoring, positions = RowScoring(data.spec), spread_positions(data.count("test"))
    forecast = answers(own.predict, data, positions)
    found: dict[str, Any] = {**evaluation, "kind": ROWS, "task": data.spec.task}
    scores, figures = np.full(len(positions), math.nan), {}
    if forecast is not None:
        truth = data.gather("test", positions)[1].numpy()
        scores = scoring.score(forecast, truth)
        figures = scoring.figures(scoring.sums(forecast, truth))
        found["model"] = {**evaluation["model"], **figures}
    if len(positions) == data.count("test"):  # of a larger split the node has judged all, and these are a part
        score = "rmse" if scoring.is_number else "log_loss"
        _refuse_difference(rundir, score, evaluation["model"].get(score), figures.get(score))
    compared = RowComparison(data, SharedWork(), EVAL_BATCH).judge(scores)
    found |= {"baselines": compared.baselines, "canaries": {"shuffled_targets": compared.canary}}
    return found | {"gate": gate_document(found)}


def answers(
    predict: Callable[[NDArray[np.float32]], Mapping[str, NDArray[np.float64]]],
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
        columns = predict(data.gather("test", positions[start : start + size])[0].numpy())
        if any(name not in columns for name in names):
            return None
        parts.append(np.column_stack([columns[name] for name in names]))
    forecast = np.concatenate(parts)
    return forecast if classes else forecast[:, 0]


def _refuse_difference(rundir: RunDir, score: str, said: float | None, found: float | None) -> None:
    is_same = said is None if found is None else said is not None and math.isclose(said, found, rel_tol=TOLERANCE)
    if not is_same:
        raise EvaluationError(
            f"{rundir.uri}/{EVALUATION} says model.{score} = {str(said)[:60]}, and the weights beside it come to "
            f"{str(found)[:60]} on the dataset's test rows: one of them was changed after the training; nothing is "
            "registered. Train again, and look who can write there"
        )

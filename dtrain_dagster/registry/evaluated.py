"""The figures that the gate reads, as they come to here: a node's report of its own model is not believed.

Of windows they follow from the predictions in the run directory and the dataset's own targets. Of rows the weights are
asked again, in a process of their own (`smoke_test.Candidate.forecast`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dtrain_dagster.registry.smoke_test import Candidate, stored_predictions
from trainer.data.sampler import MOST_JUDGED, spread_positions
from trainer.evaluation.gate import gate_document, score_of
from trainer.evaluation.row_scores import RowScoring
from trainer.rundir import EVALUATION, PREDICTIONS
from trainer.spec import ROWS, RowSpec

FIGURES = ("windows", "days", "first_date", "last_date", "model", "halves", "baselines")
"""The figures of windows that the gate and the model card read."""
TOLERANCE, LEAST = 1e-3, 1e-6
"""The relative and the absolute tolerance of the model's score: other kernels in single precision. The absolute one of
an error of numbers is in deviations of the target."""


class EvaluationError(ValueError):
    """A contradiction between a node's report and its model. The message names the figure."""


def judge_again(trained: Candidate, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's report with the figures of model and baselines as they come to here, and the verdict that
    follows. Raise `EvaluationError` where it says another score of the model, `AnswerError` for predictions that are
    none, and `run_model.RunModelError` for a model that does not answer."""
    spec = trained.own.spec
    is_table = isinstance(spec, RowSpec)
    found = _judge_rows(trained, evaluation) if is_table else _judge_windows(trained, evaluation)
    score = score_of(found)
    # Of a larger split of rows the node has judged all, and these are a part.
    if score is not None and not (is_table and trained.data.count("test") > MOST_JUDGED):
        given, least = evaluation.get("model"), LEAST * (spec.target_std if score == "rmse" else 1.0)
        said, figure = given.get(score) if isinstance(given, Mapping) else None, found["model"][score]
        if not isinstance(said, int | float) or not math.isclose(said, figure, rel_tol=TOLERANCE, abs_tol=least):
            raise EvaluationError(
                f"{trained.run_dir}/{EVALUATION} says model.{score} = {str(said)[:60]}, and from the model and the "
                f"dataset follows {str(figure)[:60]}: one of the files was changed after the training; nothing is "
                "registered. Train again, and check who can write there"
            )
    return found | {"gate": gate_document(found)}


def _judge_windows(trained: Candidate, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    from trainer.evaluation.window_report import Predictions, build_report, judge_baselines

    shards = trained.data
    rows = shards.end_rows("test", spread_positions(shards.count("test")))
    stored = stored_predictions(trained.rundir, shards, ("loss", "mu", "sigma", "nu"))
    target = shards.column(shards.spec.target, rows).astype(np.float64)  # the dataset's own, whatever nodes wrote
    predictions = Predictions(rows, target, *(values.astype(np.float64) for values in stored.values()))
    days = shards.dates(predictions.row).astype("datetime64[D]")
    try:
        with np.errstate(all="ignore"):
            found = build_report(predictions, days, judge_baselines(shards, "test"), shards.spec.horizon)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise EvaluationError(f"{trained.run_dir}/{PREDICTIONS} cannot be judged ({error}): train again") from error
    return {**evaluation, **{name: found[name] for name in FIGURES}}


def _judge_rows(trained: Candidate, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with the figures of model, baselines and canary as they come to here. Other figures of the
    model stay the node's."""
    import numpy as np

    from trainer.evaluation.evaluate import SharedWork
    from trainer.evaluation.row_comparison import compare_rows

    data = trained.data
    scoring, positions, forecast = RowScoring(data.spec), spread_positions(data.count("test")), trained.forecast
    found: dict[str, Any] = {**evaluation, "kind": ROWS, "task": data.spec.task}
    scores, figures = np.full(len(positions), math.nan), dict.fromkeys(("log_loss", "rmse"))
    if forecast is not None:
        truth = data.samples("test", positions)[1].numpy()
        scores, figures = scoring.score(forecast, truth), scoring.figures(scoring.sums(forecast, truth))
    found["model"] = {**evaluation["model"], **figures}
    baselines, canary = compare_rows(data, scores, SharedWork())
    return found | {"baselines": baselines, "canaries": {"shuffled_targets": canary}}

"""`RowJudge`: how a model of rows is validated while it trains, and how it is reported on at the end.

Every row of a split counts exactly once. Ranks take whole batches, the same at any world size, and sums are taken in
float64, so a report does not depend on how many ranks there were, but for rounding in the fit of the linear baseline.
The baselines are judged in `trainer.evaluation.row_comparison`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.data.row_data import RowData
from trainer.data.sampler import spread_positions
from trainer.documents.schemas import FinishStage
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.gate import gate_document
from trainer.evaluation.judge import JudgeRequest, evaluate_task
from trainer.evaluation.row_comparison import Compared, RowComparison
from trainer.evaluation.row_scores import RowScoring, calibration_table
from trainer.evaluation.shared_work import SharedWork
from trainer.model.task import SupervisedTask
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir
from trainer.spec import ROWS

Array = NDArray[np.float64]


def row_task(criterion: nn.Module) -> SupervisedTask:
    """Return the task of a loss, with the accuracy where it knows probabilities, and the squared error in the target's
    unit where it knows a forecast."""
    known: Any = criterion
    metrics: dict[str, Callable[[Any, Any], Tensor]] = {}
    if callable(getattr(criterion, "probabilities", None)):
        metrics["accuracy"] = lambda outputs, target: (known.probabilities(outputs).argmax(1) == target).float()
    elif callable(getattr(criterion, "point", None)):
        metrics["squared_error"] = lambda outputs, target: (known.point(outputs) - target) ** 2
    return SupervisedTask(criterion, metrics)


@dataclass(frozen=True, slots=True)
class RowJudge:
    """Judges forecasts of classes by log-loss, accuracy and calibration, and forecasts of numbers by their errors,
    against the constant and a linear model."""

    task: SupervisedTask
    criterion: nn.Module
    data: RowData

    def validate(self, request: JudgeRequest) -> Evaluation:
        """Return the judgement on the validation split."""
        return evaluate_task(self.task, self.data, "valid", request)

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """Return the report on the test split. Rank 0 writes it, and single forecasts as ``predictions.npz`` (row,
        target, loss, mu: the number or the code of the class; of a large split a part). Raise ValueError where the loss
        is not finite, before anything is written."""
        begin("test split")
        work = SharedWork(request.world)
        loss, sums, table, own = self._judge_model(request, work)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss on the test split is {loss}: lower training.learning_rate or training.clip_norm"
            )
        begin("baselines")
        comparison = RowComparison(self.data, work, request.batch_size, request.before_batch)
        compared = comparison.judge(own)
        begin("report")
        report = self._document(loss, sums, compared)
        if request.world.rank == 0:
            _write_predictions(run_dir, table)
            run_dir.write_json(EVALUATION, report)
        request.world.barrier()  # rank 0 takes the longer to write, the more data there is
        return report

    def _document(self, loss: float, sums: Array | None, compared: Compared) -> dict[str, Any]:
        scoring = RowScoring(self.data.spec)
        model: dict[str, Any] = {"loss": loss, "samples": self.data.count("test")}
        baselines, canary = compared.baselines, compared.canary
        notes = []
        if sums is None:
            notes.append("the loss gives neither probabilities nor a forecast, so it is judged by its own value alone")
        else:
            model |= scoring.figures(sums)
            score = "rmse" if scoring.is_number else "log_loss"
            not_below = [name for name, figures in baselines.items() if not model[score] < figures[score]]
            if not_below:
                notes.append(f"{score} is not below that of {' and '.join(not_below)}: this model gains nothing")
        if not canary["passed"]:
            notes.append(
                "a linear model of shuffled targets is better than the constant beyond chance: the figures of this "
                "report cannot be trusted"
            )
        report: dict[str, Any] = {
            "kind": ROWS, "split": "test", "task": self.data.spec.task, "model": model, "baselines": baselines,
            "canaries": {"shuffled_targets": canary}, "notes": notes,
        }  # fmt: skip
        if sums is not None and not scoring.is_number:
            report["calibration"] = calibration_table(sums)
        report["gate"] = gate_document(report)
        return report

    def _judge_model(self, request: JudgeRequest, work: SharedWork) -> tuple[float, Array | None, Array, Array]:
        """Return the mean loss, the sums for the figures (None where the loss knows no forecast), the table of single
        forecasts (row, target, loss, forecast), and the scores of this rank's part of it (`RowScoring.score`; NaN
        without a forecast)."""
        known: Any = self.criterion
        scoring = RowScoring(self.data.spec)
        kind = "point" if scoring.is_number else "probabilities"
        has_forecast = callable(getattr(self.criterion, kind, None))
        count = self.data.count("test")
        kept = spread_positions(count)
        first, last = work.part(count, request.batch_size)
        begin, end = np.searchsorted(kept, (first, last))
        part, scores = np.empty((end - begin, 4)), np.full(end - begin, math.nan)
        total = np.zeros(1)
        sums = None
        was_training = request.model.training
        request.model.eval()
        with torch.no_grad():
            for start in range(first, last, request.batch_size):
                request.before_batch()
                positions = np.arange(start, min(start + request.batch_size, last))
                rows, target = self.data.read("test", positions, request.device)
                outputs = request.model(rows).float()
                losses = known(outputs, target).double().cpu().numpy()
                total += losses.sum()
                chosen = np.full(len(losses), math.nan)
                truth = target.cpu().numpy()
                some = slice(*np.searchsorted(kept[begin:end], (start, start + len(losses))))
                here = kept[begin:end][some] - start
                if has_forecast:
                    found = getattr(known, kind)(outputs).double().cpu().numpy()
                    scored = scoring.sums(found, truth)
                    sums = scored if sums is None else sums + scored
                    scores[some] = scoring.score(found[here], truth[here])
                    chosen = found if scoring.is_number else found.argmax(axis=1).astype(np.float64)
                part[some] = np.column_stack([kept[begin:end][some], truth[here], losses[here], chosen[here]])
        request.model.train(was_training)
        loss = float(work.sum(total)[0]) / count
        table = work.join(part, int(begin), len(kept))
        if not has_forecast:
            return loss, None, table, scores
        return loss, work.sum(np.zeros(scoring.width) if sums is None else sums), table, scores


def _write_predictions(run_dir: RunDir, table: Array) -> None:
    buffer = io.BytesIO()
    nothing = np.full(len(table), math.nan)  # that no distribution was forecast
    np.savez_compressed(
        buffer, row=table[:, 0].astype(np.int64), target=table[:, 1], loss=table[:, 2], mu=table[:, 3], sigma=nothing,
        nu=nothing,
    )  # fmt: skip
    run_dir.storage.write(PREDICTIONS, buffer.getvalue())

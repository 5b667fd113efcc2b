"""`RowJudge`: how a model of rows is validated while it trains, and how it is reported on at the end.

Every row of a split counts exactly once. Ranks take whole batches, the same at any world size, and sums are taken in
float64, so a report does not depend on how many ranks there were, but for rounding in the fit of the linear baseline.
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
from trainer.documents.events import FinishStage
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.judge import JudgeRequest, evaluate_task
from trainer.evaluation.row_baselines import LinearModel, constant_forecast, fit_linear
from trainer.evaluation.row_scores import (
    calibration_table,
    class_figures,
    class_sums,
    log_losses,
    number_figures,
    number_sums,
)
from trainer.evaluation.shared_work import SharedWork
from trainer.model.task import SupervisedTask
from trainer.rundir import EVALUATION, PREDICTIONS, RunDir
from trainer.spec import REGRESSION

Array = NDArray[np.float64]
CERTAIN = 3.0
"""Standard errors by which a canary has to be better than the constant before something is wrong."""


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
        constant = constant_forecast(self.data, work)
        linear = fit_linear(self.data, work, request.before_batch)
        shuffled = fit_linear(self.data, work, request.before_batch, shuffle_seed=0)
        named = {"constant": lambda rows: _repeated(constant, len(rows), self._is_number), "linear": linear.forecast}
        judged = {name: self._judge(forecast, own, request, work) for name, forecast in named.items()}
        canary = self._canary(shuffled, constant, request, work)
        begin("report")
        report = self._document(loss, sums, judged, canary)
        if request.world.rank == 0:
            _write_predictions(run_dir, table)
            run_dir.write_json(EVALUATION, report)
        request.world.barrier()  # rank 0 takes the longer to write, the more data there is
        return report

    @property
    def _is_number(self) -> bool:
        return self.data.spec.task == REGRESSION

    def _document(
        self, loss: float, sums: Array | None, judged: dict[str, tuple[Array, dict]], canary: dict
    ) -> dict[str, Any]:
        figures_of = number_figures if self._is_number else class_figures
        model: dict[str, Any] = {"loss": loss, "samples": self.data.count("test")}
        notes = []
        baselines = {name: {**figures_of(found), **gain} for name, (found, gain) in judged.items()}
        if sums is None:
            notes.append("the loss knows neither probabilities nor a forecast, so it is judged by its own value alone")
        else:
            model |= figures_of(sums)
            score = "rmse" if self._is_number else "log_loss"
            not_below = [name for name, figures in baselines.items() if not model[score] < figures[score]]
            if not_below:
                notes.append(
                    f"{score} is not below that of {' and '.join(not_below)}: nothing was gained by this model"
                )
        if not canary["passed"]:
            notes.append(
                "a linear model of shuffled targets is better than the constant beyond chance: the figures of this "
                "report cannot be trusted"
            )
        report: dict[str, Any] = {
            "kind": "rows", "split": "test", "task": self.data.spec.task, "model": model, "baselines": baselines,
            "canaries": {"shuffled_targets": canary}, "notes": notes,
        }  # fmt: skip
        if sums is not None and not self._is_number:
            report["calibration"] = calibration_table(sums)
        return report

    def _judge_model(self, request: JudgeRequest, work: SharedWork) -> tuple[float, Array | None, Array, Array]:
        """Return the mean loss, the sums for the figures (None where the loss knows no forecast), the table of single
        forecasts (row, target, loss, forecast), and the scores of this rank's part of it (`_score`; NaN without a
        forecast)."""
        known: Any = self.criterion
        kind = "point" if self._is_number else "probabilities"
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
                    scored = self._sums(found, truth)
                    sums = scored if sums is None else sums + scored
                    scores[some] = self._score(found[here], truth[here])
                    chosen = found if self._is_number else found.argmax(axis=1).astype(np.float64)
                part[some] = np.column_stack([kept[begin:end][some], truth[here], losses[here], chosen[here]])
        request.model.train(was_training)
        loss = float(work.sum(total)[0]) / count
        table = work.join(part, int(begin), len(kept))
        if not has_forecast:
            return loss, None, table, scores
        return loss, work.sum(np.zeros(self._width) if sums is None else sums), table, scores

    def _judge(
        self, forecast: Callable[[Tensor], Array], own: Array, request: JudgeRequest, work: SharedWork
    ) -> tuple[Array, dict[str, float | None]]:
        """Return the sums of a baseline's scores, and what the model gains over it per row (`_score`), with the paired
        t-statistic; nothing of the latter where the model has no scores (``own``, of this rank's part)."""
        count = self.data.count("test")
        kept = spread_positions(count)
        first, last = work.part(count, request.batch_size)
        begin = np.searchsorted(kept, first)
        sums, gains = np.zeros(self._width), np.zeros(3)
        for start in range(first, last, request.batch_size):
            request.before_batch()
            rows, target = self.data.gather("test", np.arange(start, min(start + request.batch_size, last)))
            found, truth = forecast(rows), target.numpy()
            sums += self._sums(found, truth)
            some = slice(*np.searchsorted(kept, (start, start + len(truth))))
            here = kept[some] - start
            gains += _moments(self._score(found[here], truth[here]) - own[some.start - begin : some.stop - begin])
        sums, gains = work.sum(sums), work.sum(gains)
        if math.isnan(gains[1]):
            return sums, {}
        mean, error = _mean_and_error(gains)
        return sums, {"model_gain": mean, "model_gain_t": mean / error if error > 0 else None}

    def _canary(self, shuffled: LinearModel, constant: Array, request: JudgeRequest, work: SharedWork) -> dict:
        """Return what a linear model of shuffled targets gains over the constant per row (`_score`), which has to be no
        more than chance."""
        first, last = work.part(self.data.count("test"), request.batch_size)
        sums = np.zeros(3)
        for start in range(first, last, request.batch_size):
            request.before_batch()
            rows, target = self.data.gather("test", np.arange(start, min(start + request.batch_size, last)))
            truth, plain = target.numpy(), _repeated(constant, len(rows), self._is_number)
            sums += _moments(self._score(plain, truth) - self._score(shuffled.forecast(rows), truth))
        mean, error = _mean_and_error(work.sum(sums))
        return {"gain": mean, "standard_error": error, "passed": mean <= CERTAIN * error}

    def _score(self, forecast: Array, truth: NDArray[Any]) -> Array:
        """(n,): log-loss in nats, or squared error in units of the target's variance."""
        if self._is_number:
            return (forecast - truth) ** 2 / self.data.spec.target_std**2
        return log_losses(forecast, truth)

    def _sums(self, forecast: Array, target: NDArray[Any]) -> Array:
        if self._is_number:
            return number_sums(forecast, target.astype(np.float64), self.data.spec.target_mean)
        return class_sums(forecast, target.astype(np.int64))

    @property
    def _width(self) -> int:
        """The number of sums."""
        nothing = np.zeros((0, max(1, len(self.data.spec.classes))))
        return len(self._sums(nothing[:, 0] if self._is_number else nothing, np.zeros(0)))


def _moments(gain: Array) -> Array:
    """(3,): count, sum and sum of squares."""
    return np.array([len(gain), gain.sum(), (gain**2).sum()])


def _mean_and_error(moments: Array) -> tuple[float, float]:
    """Return the mean and its standard error."""
    count, total, squares = moments.tolist()
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean**2) / count)


def _repeated(constant: Array, count: int, is_number: bool) -> Array:
    """Return the constant as forecasts of ``count`` rows."""
    return np.repeat(constant, count) if is_number else np.tile(constant, (count, 1))


def _write_predictions(run_dir: RunDir, table: Array) -> None:
    buffer = io.BytesIO()
    nothing = np.full(len(table), math.nan)  # that no distribution was forecast
    np.savez_compressed(
        buffer, row=table[:, 0].astype(np.int64), target=table[:, 1], loss=table[:, 2], mu=table[:, 3], sigma=nothing,
        nu=nothing,
    )  # fmt: skip
    run_dir.storage.write(PREDICTIONS, buffer.getvalue())

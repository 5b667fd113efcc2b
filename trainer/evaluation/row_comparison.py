"""The baselines of a table on its test split, and what a model gains over them row by row.

Who forecasts is of no matter here: a rank compares the model that it has trained, and whoever registers a model
compares what its weights answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.row_data import RowData
from trainer.data.sampler import spread_positions
from trainer.evaluation.row_baselines import LinearModel, constant_forecast, fit_linear
from trainer.evaluation.row_scores import class_figures, class_sums, log_losses, number_figures, number_sums
from trainer.evaluation.shared_work import SharedWork
from trainer.spec import REGRESSION, RowSpec

Array = NDArray[np.float64]
CERTAIN = 3.0
"""Standard errors by which a canary has to be better than the constant before something is wrong."""


@dataclass(frozen=True, slots=True)
class RowScoring:
    """How forecasts of rows are scored, by their task: numbers (n,), or probabilities of classes (n, C)."""

    spec: RowSpec

    @property
    def is_number(self) -> bool:
        """Whether the target is a number."""
        return self.spec.task == REGRESSION

    def score(self, forecast: Array, truth: NDArray[Any]) -> Array:
        """Return the score of each row (n,): log-loss in nats, or squared error in units of the target's variance."""
        if self.is_number:
            return (forecast - truth) ** 2 / self.spec.target_std**2
        return log_losses(forecast, truth)

    def sums(self, forecast: Array, target: NDArray[Any]) -> Array:
        """Return what adds up over rows for `figures`."""
        if self.is_number:
            return number_sums(forecast, target.astype(np.float64), self.spec.target_mean)
        return class_sums(forecast, target.astype(np.int64))

    def figures(self, sums: Array) -> dict[str, Any]:
        """Return the figures of a forecast."""
        return number_figures(sums) if self.is_number else class_figures(sums)

    @property
    def width(self) -> int:
        """The number of sums."""
        nothing = np.zeros((0, max(1, len(self.spec.classes))))
        return len(self.sums(nothing[:, 0] if self.is_number else nothing, np.zeros(0)))


@dataclass(frozen=True, slots=True)
class Compared:
    """The baselines and the canary as ``evaluation.json`` has them."""

    baselines: dict[str, dict[str, Any]]
    """The figures of each, and what the model gains over it."""
    canary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowComparison:
    """The comparison on the test split, in batches that ranks share."""

    data: RowData
    work: SharedWork
    batch_size: int
    before_batch: Callable[[], object] = lambda: None
    """Called before each batch and each step of a fit; it may raise, to end it."""

    def judge(self, own: Array) -> Compared:
        """Return what the constant and the linear model come to beside a model whose scores on this rank's part of
        `trainer.data.sampler.spread_positions` are ``own`` (`RowScoring.score`; NaN without a forecast). A
        collective."""
        constant = constant_forecast(self.data, self.work)
        linear = fit_linear(self.data, self.work, self.before_batch)
        shuffled = fit_linear(self.data, self.work, self.before_batch, shuffle_seed=0)
        is_number = self._scoring.is_number
        named = {"constant": lambda rows: _repeated(constant, len(rows), is_number), "linear": linear.forecast}
        baselines = {}
        for name, forecast in named.items():
            sums, gain = self._judge(forecast, own)
            baselines[name] = {**self._scoring.figures(sums), **gain}
        return Compared(baselines, self._canary(shuffled, constant, self._learned(baselines)))

    def _learned(self, baselines: Mapping[str, Mapping[str, float]]) -> float:
        """Return what the linear model gains over the constant per row, in the units of `RowScoring.score`."""
        constant, linear = baselines["constant"], baselines["linear"]
        if self._scoring.is_number:
            return (constant["rmse"] ** 2 - linear["rmse"] ** 2) / self.data.spec.target_std**2
        return constant["log_loss"] - linear["log_loss"]

    @property
    def _scoring(self) -> RowScoring:
        return RowScoring(self.data.spec)

    def _judge(self, forecast: Callable[[Tensor], Array], own: Array) -> tuple[Array, dict[str, float | None]]:
        """Return the sums of a baseline's scores, and what the model gains over it per row, with the paired t-statistic
        over rows; nothing of the latter where the model has no scores."""
        count = self.data.count("test")
        kept = spread_positions(count)
        first, last = self.work.part(count, self.batch_size)
        begin = np.searchsorted(kept, first)
        sums, gains = np.zeros(self._scoring.width), np.zeros(3)
        for start in range(first, last, self.batch_size):
            self.before_batch()
            rows, target = self.data.gather("test", np.arange(start, min(start + self.batch_size, last)))
            found, truth = forecast(rows), target.numpy()
            sums += self._scoring.sums(found, truth)
            some = slice(*np.searchsorted(kept, (start, start + len(truth))))
            here = kept[some] - start
            gains += _moments(
                self._scoring.score(found[here], truth[here]) - own[some.start - begin : some.stop - begin]
            )
        sums, gains = self.work.sum(sums), self.work.sum(gains)
        if math.isnan(gains[1]):
            return sums, {}
        mean, error = _mean_and_error(gains)
        return sums, {"model_gain": mean, "model_gain_t": mean / error if error > 0 else None}

    def _canary(self, shuffled: LinearModel, constant: Array, learned: float) -> dict[str, Any]:
        """Return what a linear model of shuffled targets gains over the constant per row, which has to be no more than
        chance: in the rows that are judged, and in the fit. Its weights are small, and as likely to point in the right
        direction as in the wrong one, which gains the more, the more can be learned of the true targets."""
        first, last = self.work.part(self.data.count("test"), self.batch_size)
        sums = np.zeros(3)
        for start in range(first, last, self.batch_size):
            self.before_batch()
            rows, target = self.data.gather("test", np.arange(start, min(start + self.batch_size, last)))
            truth, plain = target.numpy(), _repeated(constant, len(rows), self._scoring.is_number)
            sums += _moments(self._scoring.score(plain, truth) - self._scoring.score(shuffled.forecast(rows), truth))
        mean, error = _mean_and_error(self.work.sum(sums))
        error = math.hypot(error, math.sqrt(4 * max(0.0, learned) / shuffled.fitted))
        return {"gain": mean, "standard_error": error, "passed": mean <= CERTAIN * error}


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

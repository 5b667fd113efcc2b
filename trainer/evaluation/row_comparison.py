"""The baselines of a table on its test split, and what a model gains over them row by row: the constant, and a linear
model fitted to training rows (logistic for classes).

Who forecasts is of no matter here: a rank compares the model that it has trained, and whoever registers a model
compares what its weights answer. How forecasts are scored is `trainer.evaluation.row_scores`.

For the linear model rows are encoded as for a model (`trainer.model.rows.RowEncoder`), in float64. Ranks share the rows
of a large table; the sums over them are the same on all, so all come to the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from trainer.data.row_data import RowData
from trainer.data.sampler import spread_positions
from trainer.evaluation.row_scores import RowScoring
from trainer.evaluation.shared_work import SharedWork
from trainer.model.rows import RowEncoder
from trainer.spec import REGRESSION, RowSpec

Array = NDArray[np.float64]
CERTAIN = 3.0
"""Standard errors by which a canary has to be better than the constant before something is wrong."""
MOST_FITTED = 1 << 15
"""The most training rows that the linear model is fitted to, at even distances."""
MOST_VALUES = 1 << 24
"""The most numbers of these rows that are held at once: fewer rows of a wide table."""
ALONE = 1 << 20
"""The most products, rows by weights, for which each rank fits the linear model by itself: to add up the gradients of
ranks at each step would take longer."""
CHUNK = 1 << 16
"""Rows whose targets are counted at once."""
STEPS = 100
"""The most iterations of the fit (L-BFGS)."""


_ADD_PARAM_GROUP = unwrap(torch.optim.Optimizer.add_param_group)
_STEP = unwrap(torch.optim.LBFGS.step)


class _Optimizer(torch.optim.LBFGS):
    """L-BFGS as torch has it. To be stepped by `_STEP`."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as `torch.optim.Optimizer.add_param_group` does."""
        _ADD_PARAM_GROUP(self, param_group)


@dataclass(frozen=True, slots=True)
class LinearModel:
    """A linear model of encoded rows."""

    encoder: nn.Module
    weights: Tensor
    """(inputs + 1, outputs) float64; the last row is the constant."""
    spec: RowSpec
    fitted: int
    """The training rows that it was fitted to."""

    def forecast(self, rows: Tensor) -> NDArray[np.float64]:
        """Return probabilities (B, C) for stored rows (B, columns), or numbers (B,) in the target's unit."""
        outputs = _extended(self.encoder, rows) @ self.weights
        if self.spec.task == REGRESSION:
            return (outputs[:, 0] * self.spec.target_std + self.spec.target_mean).numpy()
        return functional.softmax(outputs, dim=1).numpy()


def constant_forecast(data: RowData, work: SharedWork) -> NDArray[np.float64]:
    """Return the frequencies of the classes in the training split (C,), or the mean of its targets (1,). A
    collective."""
    if data.spec.task == REGRESSION:
        return np.array([data.spec.target_mean])
    first, last = work.part(data.count("train"), CHUNK)
    counts = np.zeros(len(data.spec.classes))
    for start in range(first, last, CHUNK):
        _, target = data.samples("train", np.arange(start, min(start + CHUNK, last)))
        counts += np.bincount(target.numpy(), minlength=len(counts))
    counts = work.sum(counts)
    return counts / counts.sum()


def fit_linear(
    data: RowData, work: SharedWork, before_step: Callable[[], object], shuffle_seed: int | None = None
) -> LinearModel:
    """Return the linear model with the least squared error, or cross entropy, plus a penalty of half the sum of squared
    weights over all rows, which keeps the weights of separable classes finite. ``shuffle_seed``: give the rows each
    other's targets. A collective; ``before_step`` may raise, to end it."""
    spec = data.spec
    count = data.count("train")
    positions = spread_positions(count, max(1, min(count, MOST_FITTED, MOST_VALUES // (spec.inputs + 1))))
    labelled = positions if shuffle_seed is None else np.random.default_rng(shuffle_seed).permutation(positions)
    encoder = RowEncoder(spec)
    is_number = spec.task == REGRESSION
    outputs = 1 if is_number else len(spec.classes)
    if len(positions) * (spec.inputs + 1) * outputs <= ALONE:
        work = SharedWork()
    first, last = work.part(len(positions), 1)
    rows, _ = data.samples("train", positions[first:last])
    _, target = data.samples("train", labelled[first:last])
    inputs = _extended(encoder, rows)
    if is_number:
        target = (target.double() - spec.target_mean) / spec.target_std
    weights = torch.zeros(inputs.shape[1], outputs, dtype=torch.float64, requires_grad=True)
    optimizer = _Optimizer([weights], max_iter=STEPS, tolerance_grad=1e-8, line_search_fn="strong_wolfe")

    def closure() -> float:
        before_step()
        weights.grad = None
        found = inputs @ weights
        loss = (
            0.5 * ((found[:, 0] - target) ** 2).sum()
            if is_number
            else functional.cross_entropy(found, target, reduction="sum")
        )
        loss.backward()
        assert weights.grad is not None
        sums = work.sum(np.concatenate([[loss.item()], weights.grad.numpy().ravel()]))
        gradient = torch.from_numpy(sums[1:]).view_as(weights)
        with torch.no_grad():
            penalised = torch.cat([weights[:-1], torch.zeros(1, outputs, dtype=torch.float64)])
            weights.grad.copy_((gradient + penalised) / len(positions))
            return (float(sums[0]) + 0.5 * penalised.square().sum().item()) / len(positions)

    with torch.no_grad():
        _STEP(optimizer, closure)
    return LinearModel(encoder, weights.detach(), spec, len(positions))


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
            rows, target = self.data.samples("test", np.arange(start, min(start + self.batch_size, last)))
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
            rows, target = self.data.samples("test", np.arange(start, min(start + self.batch_size, last)))
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


def _extended(encoder: nn.Module, rows: Tensor) -> Tensor:
    """Return encoded rows and a column of ones, float64."""
    with torch.no_grad():
        encoded = encoder(rows).double()
    return torch.cat([encoded, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)

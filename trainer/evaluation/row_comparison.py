"""The baselines of a table on its test split, and what a model gains over them row by row: the constant, and a linear
model fitted to training rows (logistic for classes).

Who forecasts is of no matter here: a rank compares the model that it has trained, and whoever registers a model
compares what its weights answer. How forecasts are scored is `trainer.evaluation.row_scores`.

For the linear model rows are encoded as for a model (`trainer.model.rows.RowEncoder`), in float64. Ranks share the rows
of a large table; the sums over them are the same on all, so all come to the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from trainer.evaluation.evaluate import EVAL_BATCH, Scores, SharedWork, score_split
from trainer.evaluation.row_scores import RowScoring
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


def compare_rows(
    data: RowData,
    own: Array,
    work: SharedWork,
    batch_size: int = EVAL_BATCH,
    before_batch: Callable[[], object] = lambda: None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the figures of the constant and of the linear model on the test split, with what a model gains over them
    whose scores at `trainer.data.sampler.spread_positions` are ``own`` (`RowScoring.score`; NaN without a forecast);
    and the canary. A collective; ``before_batch`` may raise, to end it.

    The canary is what a linear model of shuffled targets gains over the constant per row, which has to be no more than
    chance: in the rows that are judged, and in the fit. Its weights are small, and as likely to point in the right
    direction as in the wrong one, which gains the more, the more can be learned of the true targets."""
    scoring = RowScoring(data.spec)
    constant = constant_forecast(data, work)
    linear, shuffled = (fit_linear(data, work, before_batch, shuffle_seed=seed) for seed in (None, 0))

    def score(batch: Any, count: int) -> Scores:
        rows, truth = batch[0], batch[1].numpy()
        plain = np.repeat(constant, count) if scoring.is_number else np.tile(constant, (count, 1))
        found = {"constant": plain, "linear": linear.forecast(rows), "shuffled": shuffled.forecast(rows)}
        return (
            {name: scoring.sums(forecast, truth) for name, forecast in found.items()},
            {name: scoring.score(forecast, truth) for name, forecast in found.items()},
        )

    judged = score_split(score, data, "test", work, batch_size, torch.device("cpu"), before_batch, keeps=True)
    plain, best, blind = (judged.kept[name] for name in ("constant", "linear", "shuffled"))
    baselines = {
        name: {**scoring.figures(judged.sums[name]), **_gain(scores - own)}
        for name, scores in (("constant", plain), ("linear", best))
    }
    gain, error = _mean_and_error(plain - blind)
    learned = float((plain - best).mean())
    error = math.hypot(error, math.sqrt(4 * max(0.0, learned) / shuffled.fitted))
    return baselines, {"gain": gain, "standard_error": error, "passed": gain <= CERTAIN * error}


def _gain(gains: Array) -> dict[str, float | None]:
    """Return what a model gains per row, with the paired t-statistic over rows; nothing of a model without scores."""
    if np.isnan(gains).any():
        return {}
    mean, error = _mean_and_error(gains)
    return {"model_gain": mean, "model_gain_t": mean / error if error > 0 else None}


def _mean_and_error(gains: Array) -> tuple[float, float]:
    """Return the mean and its standard error."""
    mean = float(gains.mean())
    return mean, math.sqrt(max(0.0, float((gains**2).mean()) - mean**2) / len(gains))


def _extended(encoder: nn.Module, rows: Tensor) -> Tensor:
    """Return encoded rows and a column of ones, float64."""
    with torch.no_grad():
        encoded = encoder(rows).double()
    return torch.cat([encoded, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)

"""Scores of forecasts of classes and of numbers, as sums that add up over batches and ranks, and the figures they give.

Pure functions: who forecasts, and which rows, is `trainer.engine.row_problem`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.spec import REGRESSION, RowSpec

Array = NDArray[np.float64]
BINS = 15
"""Bins of equal width for the confidence of a forecast, in which it is compared with how often it was right."""
LEAST_PROBABILITY = 1e-15
"""A smaller probability counts as this one, so that a sum of log-losses stays finite."""


def log_losses(probabilities: Array, target: NDArray[np.int64]) -> Array:
    """Return the log-loss of each row (n,) in nats, for probabilities (n, C) and codes of classes (n,)."""
    return -np.log(np.maximum(probabilities[np.arange(len(target)), target], LEAST_PROBABILITY))


def class_sums(probabilities: Array, target: NDArray[np.int64]) -> Array:
    """Return what adds up for `class_figures`, for probabilities (n, C) and codes of classes (n,)."""
    confidence, chosen = probabilities.max(axis=1), probabilities.argmax(axis=1)
    is_right = (chosen == target).astype(np.float64)
    right = probabilities[np.arange(len(target)), target]
    brier = (probabilities**2).sum(axis=1) - 2 * right + 1
    place = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    bins = [np.bincount(place, weights, minlength=BINS) for weights in (np.ones(len(target)), confidence, is_right)]
    plain = [float(len(target)), log_losses(probabilities, target).sum(), is_right.sum(), brier.sum()]
    return np.concatenate([plain, *bins])


def class_figures(sums: Array) -> dict[str, Any]:
    """Return log-loss (nats), accuracy, Brier score and expected calibration error. The last is the mean over rows of
    the distance between confidence and accuracy in the row's bin."""
    count, (held, confidence, right) = sums[0], sums[4:].reshape(3, BINS)
    return {
        "log_loss": float(sums[1] / count),
        "accuracy": float(sums[2] / count),
        "brier": float(sums[3] / count),
        "ece": float(np.abs(confidence - right)[held > 0].sum() / count),
    }


def calibration_table(sums: Array) -> list[dict[str, float]]:
    """Return, for each bin of confidence that holds rows: their share, mean confidence and accuracy."""
    count, (held, confidence, right) = sums[0], sums[4:].reshape(3, BINS)
    return [
        {
            "share": float(held[place] / count),
            "confidence": float(confidence[place] / held[place]),
            "accuracy": float(right[place] / held[place]),
        }
        for place in np.flatnonzero(held)
    ]


def number_sums(forecast: Array, target: Array, center: float) -> Array:
    """Return what adds up for `number_figures`. ``center``: a number near the targets, so that sums of squares keep
    their digits."""
    error, moved = forecast - target, target - center
    return np.array([len(target), (error**2).sum(), np.abs(error).sum(), moved.sum(), (moved**2).sum()])


def number_figures(sums: Array) -> dict[str, float]:
    """Return root mean squared error and mean absolute error in the target's unit, and R², the share of the targets'
    variance on these very rows that is explained (negative where their mean would have been better)."""
    count, squared, absolute, moved, moved_squared = sums.tolist()
    spread = moved_squared - moved**2 / count
    figures = {"rmse": math.sqrt(squared / count), "mae": absolute / count}
    return figures | ({"r2": 1 - squared / spread} if spread > 0 else {})


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

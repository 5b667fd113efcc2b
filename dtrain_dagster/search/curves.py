"""What a learning curve will still do, with its uncertainty: a Gaussian mixture over curves, in closed form.

A curve is ``y(t) = end + drop * g(t)`` for the share ``t`` of a training from 0 to 1, where the shape ``g`` falls from
1 at the first evaluation to 0 at the end: a power of t, its logarithm, or an exponential. ``end`` and ``drop`` are
Gaussian within each component, so that evaluations with Gaussian noise update them exactly (conjugate linear
regression). The components come from the trials before: each trial is one per shape, widened by a kernel bandwidth
(Silverman's rule on robust deviations), beside a broad one for curves like none before. So after one evaluation a
prediction rests on what trials did that began alike, and after several on the curve itself.

All this is done on the logarithm of what a score lies above a floor (`floor_of`): close to the best score differences
are small and count, far from it they are large and do not. Lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

POWERS = (-1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
"""Exponents p of ``t ** -p``; 0 is the logarithm, and those below it still fall at the end, as a falling learning rate
makes curves do."""
RATES = (3.0, 10.0)
"""Rates of the exponentials, per whole training."""
NOISES = (1.0, 3.0)
"""Noise of a curve, as multiples of the usual one: some trials are more restless than others."""
TEMPER = 0.25
"""What an evaluation counts of one that would be independent of those before: a curve strays from any shape for some
evaluations together. Without it intervals are too narrow, and trials are ended that would have won."""
LEAST_NOISE = 0.01
"""Least noise of an evaluation, as a share of the deviation of scores between trials."""
BROAD = 3.0
"""Deviations of the broad component, in those of the trials before."""
LEAST_WEIGHT = 0.01
"""Least weight of a shape among those of one trial."""
MOST_TRIALS = 64
"""The latest trials that a prediction rests on."""
LEAST_ABOVE = 1e-12
"""Least height above a floor that is told from none."""
NUMBERS = 7919
"""Seed of the numbers that samples are drawn with, always the same: a prediction is a function of its data."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of a trial: scores after the shares ``1/of, 2/of, …`` of its training, at which lower is
    better."""

    scores: tuple[float, ...]
    of: int
    """Evaluations of the whole training."""

    @property
    def is_whole(self) -> bool:
        """Return whether the training is over."""
        return len(self.scores) >= self.of

    @property
    def best(self) -> float:
        """Return the best score."""
        return min(self.scores)

    def above(self, floor: float) -> Curve:
        """Return the logarithms of what it lies above a floor."""
        return Curve(tuple(math.log(max(score - floor, LEAST_ABOVE)) for score in self.scores), self.of)


@dataclass(frozen=True, slots=True)
class Mixture:
    """A Gaussian mixture over (end, drop) of a curve, with a shape and a noise for each component."""

    weight: Array
    """(C,), sums to 1."""
    mean: Array
    """(C, 2): end and drop."""
    covariance: Array
    """(C, 2, 2)."""
    shape: NDArray[np.int64]
    """(C,): the number of its shape."""
    noise: Array
    """(C,): standard deviation of an evaluation."""

    def given(self, curve: Curve) -> Mixture:
        """Return the mixture after these evaluations (Bayes' rule, exact for each component)."""
        if not curve.scores:
            return self
        scores = np.array(curve.scores)
        basis = shapes(curve.of)[:, : len(scores)][self.shape]  # (C, m)
        rows = np.stack([np.ones_like(basis), basis], axis=2)  # (C, m, 2)
        residual = scores - np.einsum("cmi,ci->cm", rows, self.mean)
        inverse = TEMPER / self.noise**2
        information = np.einsum("cmi,cmj->cij", rows, rows) * inverse[:, None, None]
        precision = np.linalg.inv(self.covariance) + information
        covariance = np.linalg.inv(precision)
        gain = np.einsum("cmi,cm->ci", rows, residual) * inverse[:, None]
        shift = np.einsum("cij,cj->ci", covariance, gain)
        fit = (residual**2).sum(1) * inverse - (gain * shift).sum(1)
        spread = np.linalg.slogdet(self.covariance)[1] + np.linalg.slogdet(precision)[1]
        log_weight = np.log(self.weight) - 0.5 * (fit + spread + 2 * TEMPER * len(scores) * np.log(self.noise))
        weight = np.exp(log_weight - log_weight.max())
        return Mixture(weight / weight.sum(), self.mean + shift, covariance, self.shape, self.noise)

    def end_moments(self) -> tuple[float, float]:
        """Return mean and variance of the end."""
        mean = float(self.weight @ self.mean[:, 0])
        return mean, float(self.weight @ (self.covariance[:, 0, 0] + (self.mean[:, 0] - mean) ** 2))

    def expecting(self, mean: float, variance: float) -> Mixture:
        """Return the mixture with an end of this mean and variance, as far as something is known of it beyond this
        mixture: by an observation of the end that would make a Gaussian of the mixture's own moments that one."""
        own_mean, own_variance = self.end_moments()
        if variance >= own_variance:
            return self
        precision = 1 / variance - 1 / own_variance
        seen = (mean / variance - own_mean / own_variance) / precision
        total = self.covariance[:, 0, 0] + 1 / precision
        gain = self.covariance[:, :, 0] / total[:, None]  # (C, 2)
        apart = seen - self.mean[:, 0]
        log_weight = np.log(self.weight) - 0.5 * (apart**2 / total + np.log(total))
        weight = np.exp(log_weight - log_weight.max())
        covariance = self.covariance - gain[:, :, None] * self.covariance[:, None, 0, :]
        return Mixture(weight / weight.sum(), self.mean + gain * apart[:, None], covariance, self.shape, self.noise)

    def without_unlikely(self) -> Mixture:
        """Return the mixture without components that hardly count."""
        kept = self.weight > LEAST_WEIGHT
        weight = self.weight[kept]
        return Mixture(
            weight / weight.sum(), self.mean[kept], self.covariance[kept], self.shape[kept], self.noise[kept]
        )

    def paths(self, of: int, done: int, count: int) -> Array:
        """Return ``count`` courses (count, of - done) of the evaluations that are left, noise included."""
        random = np.random.default_rng((NUMBERS, of, done))
        edges = np.cumsum(self.weight)
        places = (np.arange(count) + 0.5) / count  # evenly through the weights: less noise than by chance
        chosen = np.minimum(np.searchsorted(edges, places * edges[-1]), len(edges) - 1)
        root = np.linalg.cholesky(self.covariance[chosen] + 1e-18 * np.eye(2))
        drawn = self.mean[chosen] + np.einsum("kij,kj->ki", root, random.standard_normal((count, 2)))
        basis = shapes(of)[:, done:][self.shape[chosen]]
        noise = self.noise[chosen][:, None] * random.standard_normal(basis.shape)
        return drawn[:, :1] + drawn[:, 1:] * basis + noise


@lru_cache(maxsize=256)
def shapes(of: int) -> Array:
    """Return each shape (K, of) at the evaluations of a training: 1 at the first one, 0 at the last."""
    share = np.arange(1, of + 1) / of
    if of == 1:
        return np.zeros((len(POWERS) + len(RATES), 1))
    raw = [-np.log(share) if power == 0 else share**-power / power for power in POWERS]
    raw += [np.exp(-rate * share) for rate in RATES]
    return np.array([(row - row[-1]) / (row[0] - row[-1]) for row in raw])


def floor_of(curves: Sequence[Curve]) -> float:
    """Return a score that none is expected to come to: as far below the best one as that is below the middle of the
    trials' best; zero where the best is positive and that would be below it, as of a loss that cannot be negative."""
    bests = [curve.best for curve in curves if curve.scores and math.isfinite(curve.best)]
    if not bests:
        return 0.0
    best = min(bests)
    gap = float(np.median(bests)) - best or max(max(curve.scores) for curve in curves if curve.scores) - best
    if not (0 < gap < math.inf):
        gap = abs(best) or 1.0
    return max(0.0, best - gap) if best > 0 else best - gap


def prior_of(known: Sequence[Curve], floor: float) -> Mixture | None:
    """Return what is known of the next trial's curve above a floor from those of others, in their order; None where
    none has been evaluated. A curve with a score that is not finite is left out: such a trial is over."""
    return _prior_of(tuple(known), floor)


@lru_cache(maxsize=8)
def _prior_of(known: tuple[Curve, ...], floor: float) -> Mixture | None:
    finite = [curve for curve in known if curve.scores and np.isfinite(curve.scores).all()]
    curves = [curve.above(floor) for curve in finite[-MOST_TRIALS:]]
    if not curves:
        return None
    everything = np.concatenate([curve.scores for curve in curves])
    centre = float(np.median(everything))
    scale = _deviation(everything) or abs(centre) or 1.0
    noise = max(_usual_noise(curves), LEAST_NOISE * scale)
    count = len(POWERS) + len(RATES)
    kinds = [(shape, level * noise) for shape in range(count) for level in NOISES]
    shape = np.array([item[0] for item in kinds])
    level = np.array([item[1] for item in kinds])
    drops = [curve.scores[0] - curve.best for curve in curves if len(curve.scores) > 1]
    drop = float(np.median(drops)) if drops else 0.5 * scale
    broad = Mixture(
        np.full(len(kinds), 1 / len(kinds)),
        np.tile([centre - drop, max(drop, 0.1 * scale)], (len(kinds), 1)),
        np.tile(np.diag([(BROAD * scale) ** 2, (BROAD * max(drop, 0.3 * scale)) ** 2]), (len(kinds), 1, 1)),
        shape,
        level,
    )
    each = [broad.given(curve).without_unlikely() for curve in curves]
    width = _bandwidth(np.array([item.weight @ item.mean for item in each]), scale)
    total = len(each) + 1
    return Mixture(
        np.concatenate([item.weight / total for item in [*each, broad]]),
        np.concatenate([item.mean for item in [*each, broad]]),
        np.concatenate([*(item.covariance + width for item in each), broad.covariance]),
        np.concatenate([item.shape for item in [*each, broad]]),
        np.concatenate([item.noise for item in [*each, broad]]),
    )


def _bandwidth(means: Array, scale: float) -> Array:
    """Return the covariance (2, 2) by which each trial's component is widened: Silverman's rule, in two dimensions, on
    values without outliers. ``means`` (n, 2)."""
    middle = np.median(means, axis=0)
    spread = np.maximum([_deviation(column) for column in means.T], 0.05 * scale)
    if len(means) < 3:
        return np.diag(spread**2) * len(means) ** (-1 / 3)
    near = np.clip(means, middle - 3 * spread, middle + 3 * spread)
    covariance = np.cov(near.T) + np.diag((0.02 * spread) ** 2)
    return covariance * len(means) ** (-1 / 3)


def _usual_noise(curves: Sequence[Curve]) -> float:
    """Return the median over trials of the deviation of their evaluations from the shape that fits them best."""
    found = [noise for curve in curves if (noise := _noise_of(curve)) is not None]
    return float(np.median(found)) if found else 0.0


@lru_cache(maxsize=4096)
def _noise_of(curve: Curve) -> float | None:
    """Return that deviation of one trial; None where it has too few evaluations."""
    count = len(curve.scores)
    if count < 4:
        return None
    scores = np.array(curve.scores) - np.mean(curve.scores)
    basis = shapes(curve.of)[:, :count]
    basis = basis - basis.mean(axis=1, keepdims=True)
    explained = (basis @ scores) ** 2 / (basis**2).sum(axis=1)  # by the line through a shape, as least squares has it
    return float(np.sqrt(max(0.0, scores @ scores - explained.max()) / (count - 2)))


def _deviation(values: Array) -> float:
    """Return the standard deviation as the middle half of the values has it."""
    low, high = np.percentile(values, [25, 75])
    return float(high - low) / 1.349

"""What the values of a trial say of its score before it has one: a Gaussian process over the space, in closed form.

A point is a trial's values in the unit cube: ranges by their share, on the scale on which they are drawn, choices as
one coordinate each, and numeric choices by their rank. What is known of each trial is a score with its uncertainty, so
that a trial that was ended early counts, and counts less. Lengths, of which each coordinate has its own, and noise are
not fitted but averaged over draws from broad distributions, each with its likelihood for a weight: with ten trials a
fit is an accident, an average is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dtrain_dagster.search.curves import Array
from dtrain_dagster.search.space import Choices, Parameter, Range, Space, Value

DRAWS = 128
"""Draws of lengths and noise over which is averaged."""
LENGTHS = (0.7, 0.9)
"""Middle of the lengths' logarithmic normal distribution, in sides of the unit square, and its deviation."""
NOISE = (0.2, 0.7)
"""The same of the noise, in deviations of the scores."""
LEAST_WEIGHT = 0.02
"""Least weight of a draw that counts, in that of the best one."""
NUMBERS = 6271
"""Seed of those draws, always the same: a prediction is a function of its data."""


def place_of(space: Space, values: Mapping[str, Value]) -> Array:
    """Return the point (d,) of a trial's values. A parameter that is not there is in the middle."""
    return np.concatenate([_coordinates(item, values) for item in space.parameters])


def _coordinates(item: Parameter, values: Mapping[str, Value]) -> Array:
    domain = item.domain
    if isinstance(domain, Range):
        if item.name not in values or domain.low == domain.high:
            return np.array([0.5])
        low, high, value = (
            (math.log(number) if domain.log else number) for number in (domain.low, domain.high, values[item.name])
        )
        return np.array([(value - low) / (high - low)])
    if _is_ordered(domain):
        ranks = sorted(domain.values)
        return np.array([ranks.index(values[item.name]) / (len(ranks) - 1) if item.name in values else 0.5])
    return np.array([float(item.name in values and values[item.name] == value) for value in domain.values])


def _is_ordered(domain: Choices) -> bool:
    return len(domain.values) > 1 and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in domain.values
    )


@dataclass(frozen=True, slots=True)
class Surface:
    """The process, given trials."""

    points: Array
    """(n, d)."""
    lengths: Array
    """(D, d), of each draw."""
    weight: Array
    """(D,)."""
    inverse: Array
    """(D, n, n), of the covariance of what was seen."""
    solved: Array
    """(D, n): that times the scores."""
    middle: float
    scale: float

    def at(self, points: Array) -> tuple[Array, Array]:
        """Return mean and variance of the scores (k,) of trials at these points (k, d)."""
        across = _kernel(points, self.points, self.lengths)  # (D, k, n)
        means = np.einsum("dkn,dn->dk", across, self.solved)
        variances = np.maximum(1.0 - np.einsum("dkn,dnm,dkm->dk", across, self.inverse, across, optimize=True), 1e-6)
        mean = self.weight @ means
        variance = self.weight @ (variances + (means - mean) ** 2)
        return self.middle + self.scale * mean, self.scale**2 * variance


def surface_of(points: Array, scores: Array, variances: Array) -> Surface:
    """Return the process, given trials at ``points`` (n, d) with ``scores`` (n,) and their ``variances`` (n,)."""
    middle = float(np.mean(scores))
    scale = float(np.std(scores)) or 1.0
    seen, unsure = (scores - middle) / scale, variances / scale**2
    count, sides = points.shape
    random = np.random.default_rng((NUMBERS, sides))
    lengths = LENGTHS[0] * math.sqrt(sides / 2) * np.exp(LENGTHS[1] * random.standard_normal((DRAWS, sides)))
    noise = NOISE[0] * np.exp(NOISE[1] * random.standard_normal(DRAWS))
    covariance = _kernel(points, points, lengths)
    covariance[:, np.arange(count), np.arange(count)] += noise[:, None] ** 2 + unsure
    root = np.linalg.cholesky(covariance)
    whitened = np.linalg.solve(root, np.broadcast_to(seen, (DRAWS, count))[:, :, None])[:, :, 0]
    fit = -0.5 * (whitened**2).sum(1) - np.log(np.diagonal(root, axis1=1, axis2=2)).sum(1)
    weight = np.exp(fit - fit.max())
    kept = weight > LEAST_WEIGHT
    inverse = np.linalg.inv(covariance[kept])
    return Surface(points, lengths[kept], weight[kept] / weight[kept].sum(), inverse, inverse @ seen, middle, scale)


def _kernel(one: Array, other: Array, lengths: Array) -> Array:
    """Return the covariance (D, k, n) of scores at two sets of points: Matérn's with 5/2, of variance 1."""
    square = np.zeros((len(lengths), len(one), len(other)))
    for side in range(one.shape[1]):
        apart = (one[:, side, None] - other[None, :, side]) ** 2
        square += apart / lengths[:, side, None, None] ** 2
    distance = np.sqrt(5 * square)
    return (1 + distance + distance**2 / 3) * np.exp(-distance)

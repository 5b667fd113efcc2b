"""What trials say of those to come: how the curve of a trial with given values goes on, and which values a fresh trial
should have.

Two models are joined. A surface over the space says what values end with (`dtrain_dagster.search.surface`), and curves
of earlier trials say how a curve goes on (`dtrain_dagster.search.curves`), which begins from what its values promise.
Fresh values are those with the greatest expected improvement of the best score so far. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from dtrain_dagster.search.curves import LEAST_ABOVE, Array, Curve, Mixture, floor_of, prior_of
from dtrain_dagster.search.space import Space, Value
from dtrain_dagster.search.surface import Surface, place_of, surface_of
from dtrain_dagster.search.trials import Trial

LEAST_TRIALS = 5
"""Trials from which a surface is made; those before are drawn at random."""
MOST_TRIALS = 128
"""The latest trials that it rests on."""
CANDIDATES = 600
"""Random values from which those of a fresh trial are chosen."""
NEIGHBOURS = 200
"""Values beside them that are those of a good trial with some drawn anew."""
GOOD_TRIALS = 5
KEPT_SHARE = 0.7
"""Share of the values that a neighbour has of its trial."""
SURE = 1e-4
"""Variance of the end of a trial that is over, in squared logarithms."""
UNSURE = 0.25
"""The same of one that failed or diverged, which counts as the worst."""
MOST_LOG = 300.0
"""Largest logarithm of a score above its floor: above it numbers overflow."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected by the trials so far. At scores, lower is better."""

    space: Space
    floor: float
    """What scores are measured from, see `floor_of`."""
    best: float
    """The best score so far."""
    prior: Mixture
    """Of the curve of a trial of which nothing is known."""
    surface: Surface | None
    """Of the logarithm of what trials end with above the floor; None where there are too few."""

    def prior_at(self, values: Mapping[str, Value]) -> Mixture:
        """Return what is expected of the curve of a trial with these values."""
        if self.surface is None:
            return self.prior
        mean, variance = self.surface.at(place_of(self.space, values)[None])
        return self.prior.expecting(float(mean[0]), float(variance[0]))

    def gains(self, places: Array) -> Array:
        """Return the expected improvement by a trial at each of these points (k, d), trained to its end: of a
        logarithmic normal distribution, in closed form (as Black and Scholes' price of an option)."""
        assert self.surface is not None
        mean, variance = self.surface.at(places)
        deviation, above = np.sqrt(variance), max(self.best - self.floor, LEAST_ABOVE)
        distance = (math.log(above) - mean) / deviation
        expected = np.exp(np.minimum(mean + variance / 2, MOST_LOG))
        return np.asarray(np.maximum(above * ndtr(distance) - expected * ndtr(distance - deviation), 0.0))


def outlook_of(
    space: Space, known: Sequence[Trial], running: Sequence[Trial], sign: float, judged: Curve | None = None
) -> Outlook | None:
    """Return the outlook; None where nothing has been evaluated. ``running``: trials beside them, with the evaluations
    that count, or none. ``judged``: the curve of a trial that is to be judged by the outlook: what it has reached
    counts, how it went does not. ``sign``: 1 where the metric is minimised, else -1."""
    curves = [trial.curve(sign) for trial in [*known, *running] if trial.scores]
    reached = [curve for curve in [*curves, *([judged] if judged else [])] if math.isfinite(curve.best)]
    floor = floor_of(reached)
    prior = prior_of(curves, floor)
    if prior is None:
        return None
    best = min(curve.best for curve in reached)
    return Outlook(space, floor, best, prior, _surface(space, known, running, sign, prior, floor))


def _surface(
    space: Space, known: Sequence[Trial], running: Sequence[Trial], sign: float, prior: Mixture, floor: float
) -> Surface | None:
    ended = [trial for trial in known if trial.state.is_final][-MOST_TRIALS:]
    begun = [trial for trial in running if trial.scores]
    ends = [_end_of(trial.curve(sign), prior, floor) for trial in [*ended, *begun]]
    if sum(end is not None for end in ends) < LEAST_TRIALS:
        return None
    worst = max(end[0] for end in ends if end is not None)
    means, variances = (np.array(column) for column in zip(*(end or (worst, UNSURE) for end in ends), strict=True))
    points = np.array([place_of(space, trial.values) for trial in [*ended, *begun]])
    surface = surface_of(points, means, variances)
    silent = np.array([place_of(space, trial.values) for trial in running if not trial.scores])
    if not len(silent):
        return surface
    expected, _ = surface.at(silent)  # as if they had ended as expected: so the next one is drawn elsewhere
    sure = np.full(len(silent), SURE)
    return surface_of(
        np.concatenate([points, silent]), np.concatenate([means, expected]), np.concatenate([variances, sure])
    )


def _end_of(curve: Curve, prior: Mixture, floor: float) -> tuple[float, float] | None:
    """Return mean and variance of the logarithm of what a trial ends with above the floor; None for one that has
    failed or diverged."""
    if not curve.scores or not np.isfinite(curve.scores).all():
        return None
    if curve.is_whole:
        return curve.above(floor).best, SURE
    mean, variance = prior.given(curve.above(floor)).end_moments()
    return mean, variance + SURE


def choose_values(
    outlook: Outlook, trials: Sequence[Trial], sign: float, random: np.random.Generator
) -> dict[str, Value]:
    """Return the values that a fresh trial should have, beside all ``trials`` so far; where the space has none that
    were not tried, some of those."""
    scored = sorted((sign * best, trial.number) for trial in trials if (best := trial.best(sign)) is not None)
    by_number = {trial.number: trial.values for trial in trials}
    good = [by_number[number] for _, number in scored[:GOOD_TRIALS]]
    tried = {place_of(outlook.space, trial.values).tobytes() for trial in trials}
    drawn = [outlook.space.draw(lambda item: item.domain.at(random.random())) for _ in range(CANDIDATES)]
    drawn += [_beside(outlook.space, good[place % len(good)], random) for place in range(NEIGHBOURS if good else 0)]
    places = [place_of(outlook.space, values) for values in drawn]
    new = [number for number, place in enumerate(places) if place.tobytes() not in tried] or [*range(len(drawn))]
    gains = outlook.gains(np.array([places[number] for number in new]))
    return drawn[new[int(np.argmax(gains))]]


def _beside(space: Space, values: Mapping[str, Value], random: np.random.Generator) -> dict[str, Value]:
    """Return these values with some drawn anew."""
    return space.draw(
        lambda item: (
            values[item.name]
            if item.name in values and random.random() < KEPT_SHARE
            else item.domain.at(random.random())
        )
    )

"""How long a training will take and what it will cost, from a probe of it: pure arithmetic.

    seconds = start-up + steps x seconds per step + evaluations x seconds per evaluation
              + checkpoints x seconds per checkpoint + finish
    dollars = nodes x seconds / 3600 x price of a node-hour

The interval comes from the spread of the probe's own step times, and is never narrower than ``MINIMUM_MARGIN``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain_dagster.costs.prices import SkuPrice, Tier

MINIMUM_MARGIN = 0.15
"""Shared machines and clouds vary by more than a short probe can see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a short run of the same training on the same cluster took. Seconds, except the count."""

    startup_seconds: float
    """From the first node's presence to the first step."""
    step_seconds: tuple[float, ...]
    """Seconds per optimizer step, one figure per logged stretch, the first stretch (warm-up) left out."""
    evaluation_seconds: float
    """One evaluation of the validation split."""
    checkpoint_seconds: float
    finish_seconds: float
    """From the last step to the end: test split, baselines, final weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """How much a training has to do."""

    steps: int
    evaluations: int
    checkpoints: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A figure and the range that it is expected in."""

    low: float
    expected: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(low=self.low * factor, expected=self.expected * factor, high=self.high * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is expected before anything is bought."""

    seconds: Interval
    usd: Interval
    usd_per_node_hour: float
    node_count: int


def work_of(
    steps_per_epoch: int,
    epochs: int,
    max_steps: int | None,
    eval_frequency: int | None,
    checkpoint_frequency: int,
) -> Work:
    """What a training has to do. Early stopping is not counted on: it can only make it cheaper."""
    steps = steps_per_epoch * epochs
    if max_steps is not None:
        steps = min(steps, max_steps)
    evaluations = -(-steps // (eval_frequency or steps_per_epoch))
    return Work(steps=steps, evaluations=evaluations, checkpoints=-(-steps // checkpoint_frequency))


def estimate_seconds(probe: Probe, work: Work) -> Interval:
    """Wall-clock seconds. The step time's interval is the probe's 10th to 90th percentile."""
    steps = sorted(probe.step_seconds)
    typical = statistics.median(steps)
    low, high = _percentile(steps, 0.10), _percentile(steps, 0.90)
    fixed = (
        probe.startup_seconds
        + work.evaluations * probe.evaluation_seconds
        + work.checkpoints * probe.checkpoint_seconds
        + probe.finish_seconds
    )
    expected = fixed + work.steps * typical
    return Interval(
        low=min(fixed + work.steps * low, expected * (1 - MINIMUM_MARGIN)),
        expected=expected,
        high=max(fixed + work.steps * high, expected * (1 + MINIMUM_MARGIN)),
    )


def estimate_cost(seconds: Interval, price: SkuPrice, tier: Tier, node_count: int) -> Estimate:
    """Dollars of ``node_count`` nodes for that long."""
    usd_per_hour = price.usd_per_hour(tier)
    return Estimate(
        seconds=seconds,
        usd=seconds.scaled(node_count * usd_per_hour / 3600),
        usd_per_node_hour=usd_per_hour,
        node_count=node_count,
    )


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest of the sorted values."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)

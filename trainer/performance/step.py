"""The model of a step whose gradients are summed while the backward pass still computes. Pure.

    step = computing + exposed sums
    exposed sums = all sums - what the backward pass hides, of all sums but the last

The sources of its parts do not belong here: `trainer.parallel.auto_compression` measures what was hidden,
`dtrain_dagster.monitoring` knows how long a backward pass takes. The time of a sum is `trainer.performance.link`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def exposed_seconds(network_times: Sequence[float], hiding_seconds: float) -> float:
    """Return the seconds for which these sums hold a step up, given in order of sending. The last never hides: with it
    the backward pass is done."""
    hidden = min(hiding_seconds, sum(network_times[:-1]))
    return sum(network_times) - hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """The parts of a step that do not depend on the link."""

    computing_seconds: float
    hiding_seconds: float
    """Seconds of communication that the backward pass can hide."""
    buckets: tuple[float, ...]
    """Bytes of gradients, in order of sending."""

    def predict_exposed(self, seconds_of: Callable[[float], float]) -> float:
        """Return the seconds for which sums hold the step up. ``seconds_of`` returns the seconds of a sum of this many
        bytes."""
        return exposed_seconds([seconds_of(size) for size in self.buckets], self.hiding_seconds)

    def predict_seconds(self, seconds_of: Callable[[float], float]) -> float:
        """Return the seconds of the step, for sums that take ``seconds_of`` their bytes."""
        return self.computing_seconds + self.predict_exposed(seconds_of)

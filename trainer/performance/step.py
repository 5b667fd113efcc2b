"""What a step takes whose gradients are summed while the backward pass still computes. Pure.

    step = computing + exposed wire
    exposed wire = all wires - what the backward pass hides, of all wires but the last

Where its parts come from does not belong here: `trainer.parallel.auto_compression` measures what was hidden,
`dtrain_dagster.monitoring` knows how long a backward pass takes. What a sum takes is `trainer.performance.link`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def exposed_seconds(wires: Sequence[float], hiding_seconds: float) -> float:
    """Returns the seconds for which these sums hold a step up, given in order of sending. The last never hides: with it
    the backward pass is done."""
    hidden = min(hiding_seconds, sum(wires[:-1]))
    return sum(wires) - hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What a step is made of beside its link."""

    computing_seconds: float
    hiding_seconds: float
    """Of wire that the backward pass can hide."""
    buckets: tuple[float, ...]
    """Bytes of gradients, in order of sending."""

    def predict_exposed(self, seconds_of: Callable[[float], float]) -> float:
        """Returns the seconds for which sums hold the step up. ``seconds_of``: what a sum of so many bytes takes."""
        return exposed_seconds([seconds_of(size) for size in self.buckets], self.hiding_seconds)

    def predict_seconds(self, seconds_of: Callable[[float], float]) -> float:
        """Returns the seconds of the step, for sums that take ``seconds_of`` their bytes."""
        return self.computing_seconds + self.predict_exposed(seconds_of)

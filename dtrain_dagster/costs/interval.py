"""A figure that is expected, and the range in which it is expected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A figure and the range in which it is expected."""

    low: float
    expected: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval with all figures times ``factor``."""
        return Interval(low=self.low * factor, expected=self.expected * factor, high=self.high * factor)

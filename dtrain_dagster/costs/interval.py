"""A figure that is expected, and the range in which it is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A figure and the range in which it is expected."""

    low: float
    expected: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(low=self.low * factor, expected=self.expected * factor, high=self.high * factor)

    def range_in(self, write: Callable[[float], str]) -> str:
        """Return ``$2.00 to $4.00``, of figures that ``write`` puts into words."""
        return f"{write(self.low)} to {write(self.high)}"

    def told(self, write: Callable[[float], str]) -> str:
        """Return ``$3.00 ($2.00 to $4.00)``."""
        return f"{write(self.expected)} ({self.range_in(write)})"

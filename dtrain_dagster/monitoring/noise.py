"""What can be told from noise in a few values of a machine that does other work too. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

NOISE_FACTOR = 3.5
"""Robust standard errors by which a figure must exceed the noise."""


def median_error(values: Sequence[float]) -> float:
    """Return the robust standard error of the median of these values, in their unit."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * spread / math.sqrt(len(values))


def is_steadily_above(limit: float, values: Sequence[float]) -> bool:
    """Return whether values are above the limit by more than their noise. On a machine that does other work too,
    processes that wait for a processor look like a network that is slow now and then."""
    return statistics.median(values) - NOISE_FACTOR * median_error(values) > limit

"""How long a collective takes: latency + bytes / bandwidth, from a run's own collectives of several sizes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain_dagster.monitoring.windows import WireTime

SIZES_APART = 4
"""The largest collective must move so many times the bytes of the smallest, or the two parts cannot be told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFit:
    """``seconds = latency_seconds + bytes * seconds_per_byte``."""

    latency_seconds: float
    seconds_per_byte: float

    def latency_share(self, collectives: Sequence[WireTime], exposed_seconds: float) -> float:
        """Of the wire time of a step that nothing hides, how much is there however few bytes are moved: latency of the
        network, and handing over from thread to thread."""
        moving = sum(item.bytes * self.seconds_per_byte * (1 - item.overlap) for item in collectives)
        return 1 - min(1.0, moving / exposed_seconds) if exposed_seconds > 0 else 0.0


def fit_wire(collectives: Sequence[WireTime]) -> WireFit | None:
    """Least squares of relative errors, both parts at least 0. None where sizes are too much alike to tell."""
    points = [
        (float(item.bytes), item.wire_seconds) for item in collectives if item.bytes > 0 and item.wire_seconds > 0
    ]
    sizes = [size for size, _ in points]
    if not points or max(sizes) < SIZES_APART * min(sizes):
        return None
    # Weights 1/seconds²: a bucket of megabytes must not drown what a few bytes say about latency.
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ya, yb = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    latency, slope = ((ya * bb - yb * ab) / determinant, (yb * aa - ya * ab) / determinant)
    if slope <= 0:
        return WireFit(latency_seconds=ya / aa, seconds_per_byte=0.0)
    if latency <= 0:
        return WireFit(latency_seconds=0.0, seconds_per_byte=yb / bb)
    return WireFit(latency_seconds=latency, seconds_per_byte=slope)

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
    """Latency and seconds per byte, both at least 0. None where sizes are too much alike to tell."""
    points = [
        (float(item.bytes), item.wire_seconds) for item in collectives if item.bytes > 0 and item.wire_seconds > 0
    ]
    sizes = [size for size, _ in points]
    if not points or max(sizes) < SIZES_APART * min(sizes):
        return None
    # Of relative errors: a bucket of megabytes must not drown what a few bytes say about latency.
    latency, per_byte = non_negative_fit([(1 / seconds, size / seconds) for size, seconds in points])
    return WireFit(latency_seconds=latency, seconds_per_byte=per_byte)


def non_negative_fit(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The two coefficients, neither below 0, with which the sums of all rows come closest to 1 (least squares)."""
    import numpy as np
    from scipy.optimize import nnls  # here, not above: loading it takes time, and few fits are asked for

    matrix = np.array(rows)
    scale = np.linalg.norm(matrix, axis=0)  # latencies and bytes are many orders of magnitude apart
    found = nnls(matrix / scale, np.ones(len(rows)))[0] / scale
    return float(found[0]), float(found[1])

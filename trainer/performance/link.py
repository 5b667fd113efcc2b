"""The model of a link: a message or a sum over ranks takes its latency, and a time for each byte. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIZES_APART = 4
"""The least ratio of the largest to the smallest collective from which latency and bandwidth can be told apart."""
LEAST_PER_BYTE = 1e-15
"""Seconds per byte below which bytes count as free: a petabyte a second is only a rounding error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The latency and the seconds per byte of one message, or of one collective of a world that stays the same.

    It has seconds per byte rather than bytes per second because the two round differently, and ranks that decide
    alike must do so from the same bits.
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, bytes_: float, messages: float = 1.0) -> float:
        """Return the seconds that ``bytes_`` take in ``messages``, one after the other."""
        return messages * self.latency_seconds + bytes_ * self.seconds_per_byte

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth; infinite where bytes cost nothing."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def over_ring(self, ranks: int) -> Link:
        """Return the link of an all-reduce around a ring of this many ranks, where this link is that of one message. A
        single rank has nothing to send."""
        return Link(
            latency_seconds=ring_messages(ranks) * self.latency_seconds,
            seconds_per_byte=bytes_carried(ranks) * self.seconds_per_byte,
        )

    def message_of_ring(self, ranks: int) -> Link:
        """Return the link of one message, where this link is that of an all-reduce around a ring of this many ranks:
        the reverse of `over_ring`. Raise ValueError for less than two ranks, which send none."""
        if ranks < 2:
            raise ValueError("a ring has at least two ranks")
        return Link(
            latency_seconds=self.latency_seconds / ring_messages(ranks),
            seconds_per_byte=self.seconds_per_byte / bytes_carried(ranks),
        )


def fit_link(observed: Iterable[tuple[float, float, float]]) -> Link:
    """Return the link that comes closest to these (messages, bytes, seconds), neither of its parts below 0. Raise
    ValueError where nothing has a duration.

    It minimises the squares of relative errors: a bucket of megabytes must not drown what a few bytes say about
    latency. Observations without a duration are left out. It loads scipy on first use, which takes a moment: it is not
    for use between the steps of a training.
    """
    rows = [(messages / seconds, bytes_ / seconds) for messages, bytes_, seconds in observed if seconds > 0]
    if not rows:
        raise ValueError("there are no measurements to fit a link to")
    latency, per_byte = _fit_non_negative(rows)
    return Link(latency_seconds=latency, seconds_per_byte=per_byte if per_byte > LEAST_PER_BYTE else 0.0)


def fit_collective(times: Iterable[tuple[int, float]]) -> Link | None:
    """Return the link of a collective of one world, from (bytes, network seconds) of several; None where their sizes
    are too similar to tell latency from bytes (see `SIZES_APART`)."""
    points = [(1.0, float(bytes_), seconds) for bytes_, seconds in times if bytes_ > 0 and seconds > 0]
    sizes = [bytes_ for _, bytes_, _ in points]
    if not points or max(sizes) < SIZES_APART * min(sizes):
        return None
    return fit_link(points)


def _fit_non_negative(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the two coefficients, neither below 0, with which the sums of all rows come closest to 1."""
    import numpy as np
    from scipy.optimize import nnls  # here, not above: loading it takes time, and few fits are made

    matrix = np.array(rows)
    scale = np.linalg.norm(matrix, axis=0)  # latencies and bytes are many orders of magnitude apart
    scale[scale == 0] = 1.0
    found = nnls(matrix / scale, np.ones(len(rows)))[0] / scale
    return float(found[0]), float(found[1])


def ring_messages(ranks: int) -> float:
    """Return the number of consecutive messages in an all-reduce around a ring of this many ranks."""
    return 2.0 * (ranks - 1)


def bytes_carried(ranks: int) -> float:
    """Return how many bytes each rank's link carries for each byte that a ring of this many ranks all-reduces."""
    return 2 * (ranks - 1) / ranks

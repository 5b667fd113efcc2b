"""What a process knows of a member that it watches, and when its silence is too long: the φ accrual failure detector,
after N. Hayashibara, X. Défago, R. Yared, T. Katayama (SRDS 2004).

Connections and messages belong in `trainer.elastic.failure_detector`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

PeerStatus = Literal["unknown", "here", "gone", "silent"]
Address = tuple[str, int]

SUSPICION = 12.0
"""The φ from which a member is silent: one live peer in 10¹² would be, were gaps normally
distributed."""
LEAST_BEATS = 5
"""Beats that have to be missing besides."""


WINDOW = 200
"""Number of the last gaps between two signs of life that count."""
LEAST_GAPS = 8
"""Gaps after which the past says something."""


class SignsOfLife:
    """The signs of life of one peer, and how likely its present silence is. Times are seconds of one clock that does
    not jump, such as `time.monotonic`."""

    def __init__(self, expected_gap: float) -> None:
        """``expected_gap``: seconds between two signs, where nothing delays them."""
        self.expected_gap = expected_gap
        self.heard_at: float | None = None
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        self._sum = self._squares = 0.0

    def hear(self, at: float) -> None:
        """Note a sign of life."""
        if self.heard_at is not None:
            self._note(max(0.0, at - self.heard_at))
        self.heard_at = at

    def forgive(self, at: float) -> None:
        """Begin anew at this time without a gap: nobody listened meanwhile."""
        self.heard_at = at

    def silence(self, now: float) -> float:
        """Return the seconds since the last sign; 0 before the first."""
        return 0.0 if self.heard_at is None else max(0.0, now - self.heard_at)

    def phi(self, now: float) -> float:
        """Return minus the decimal logarithm of the chance that a live peer is silent for as long as this one is now: 1
        is a chance of one in ten, 8 of one in a hundred million. Gaps count as normally distributed; what is known of
        them is mixed with what is expected, so that a short or a very regular past makes nobody certain. 0 before the
        first sign."""
        if self.heard_at is None:
            return 0.0
        count = len(self._gaps)
        mean, deviation = self.expected_gap, self.expected_gap / 2
        if count >= LEAST_GAPS:
            mean = max(mean, self._sum / count)
            deviation = max(deviation, math.sqrt(max(0.0, self._squares / count - (self._sum / count) ** 2)))
        return tail_of((self.silence(now) - mean) / deviation)

    def _note(self, gap: float) -> None:
        if len(self._gaps) == self._gaps.maxlen:
            oldest = self._gaps[0]
            self._sum, self._squares = self._sum - oldest, self._squares - oldest * oldest
        self._gaps.append(gap)
        self._sum, self._squares = self._sum + gap, self._squares + gap * gap


def tail_of(deviations: float) -> float:
    """Return minus the decimal logarithm of the chance that a normally distributed value lies this many standard
    deviations above its mean, or further."""
    if deviations > 30.0:  # where the chance itself is no float any more: its known asymptote
        return (deviations**2 / 2 + math.log(deviations * math.sqrt(2 * math.pi))) / math.log(10)
    return -math.log10(math.erfc(deviations / math.sqrt(2)) / 2)


@dataclass(slots=True)
class WatchedPeer:
    """A member that this process watches, with the connection to it."""

    address: Address
    signs: SignsOfLife
    view: PeerStatus = "unknown"
    heard_at: float = field(default_factory=time.monotonic)
    dropped: int = 0
    task: asyncio.Task[None] | None = None
    is_connected: bool = False

    def is_overdue(self, now: float, pause: float, timeout: float, adapts: bool) -> bool:
        """Return whether it has been silent for too long: longer than ``timeout``, or, where detection ``adapts``, out
        of proportion to its silences before. ``pause``: seconds between two beats; ``now``: of `time.monotonic`."""
        silence = now - self.heard_at
        if silence > timeout or not adapts:
            return silence > timeout
        self.signs.expected_gap = pause
        return silence > LEAST_BEATS * pause and self.signs.phi(now) > SUSPICION

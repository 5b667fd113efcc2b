"""What a process knows of a member that it watches, and when its silence is too long.

Connections and messages belong in `trainer.elastic.failure_detector`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from trainer.elastic.phi_accrual import SignsOfLife

PeerStatus = Literal["unknown", "here", "gone", "silent"]
Address = tuple[str, int]

SUSPICION = 12.0
"""The φ (`phi_accrual`) from which a member is silent: one live peer in 10¹² would be, were gaps normally
distributed."""
LEAST_BEATS = 5
"""Beats that have to be missing besides."""


@dataclass(slots=True)
class WatchedPeer:
    """A member that this process watches, with the connection to it."""

    address: Address
    signs: SignsOfLife
    view: PeerStatus = "unknown"
    heard_at: float = field(default_factory=time.monotonic)
    dropped: int = 0
    task: asyncio.Task[None] | None = None
    pulse_at: float = float("-inf")
    """When it last gave a sign of life unasked."""
    writer: asyncio.StreamWriter | None = None
    """The authenticated connection to it, while there is one."""
    letter: bytes = b""
    """The last line for this peer alone. Each new connection sends it again: it may have been lost with the last."""
    is_shared: bool = False
    """Whether one connection is enough for both, since it watches this process, too."""
    failures: int = 0
    """Attempts to connect in a row that came to nothing."""

    def is_overdue(self, now: float, pause: float, timeout: float, adapts: bool) -> bool:
        """Return whether it has been silent for too long: longer than ``timeout``, or, where detection ``adapts``, out
        of proportion to its silences before. ``pause``: seconds between two beats; ``now``: of `time.monotonic`."""
        silence = now - self.heard_at
        if silence > timeout or not adapts:
            return silence > timeout
        self.signs.expected_gap = pause
        return silence > LEAST_BEATS * pause and self.signs.phi(now) > SUSPICION

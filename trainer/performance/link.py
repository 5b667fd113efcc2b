"""What a link takes for a message, and for a sum over ranks: the latency, and the bytes by what each takes. Pure.

Which sums there are and what hides them does not belong here, see `trainer.performance.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a link takes: of one message, or of one collective of a world that stays the same.

    It has seconds per byte rather than bytes per second because the two round differently, and ranks that decide
    alike must do so from the same bits.
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, bytes_: float, messages: float = 1.0) -> float:
        """Returns the seconds that so many bytes take in so many messages, one after the other."""
        return messages * self.latency_seconds + bytes_ * self.seconds_per_byte


def link_of(times: Sequence[tuple[int, float]]) -> Link:
    """Returns the link that took these (bytes, wire seconds) for collectives of several sizes. The smallest tells the
    latency, the others the rest; where nothing larger was seen, bytes cost nothing.

    It is for decisions during training: no library has to be loaded, and nothing iterates. Of noisy sizes `fit_link`
    makes more.
    """
    least, latency = min(times)
    moved = sum(bytes_ - least for bytes_, _ in times)
    took = sum(max(0.0, seconds - latency) for _, seconds in times)
    return Link(latency_seconds=latency, seconds_per_byte=took / moved if moved else 0.0)


def bytes_carried(ranks: int) -> float:
    """Returns how many bytes each rank's link carries for each byte that a ring of so many ranks all-reduces."""
    return 2 * (ranks - 1) / ranks

"""Who watches whom, and whose turn it is to gather. Pure functions of names.

Up to `FULL_MESH` members each watches every other one. In a larger world each watches about 2·log2(N) others: those at
the distances 1, 2, 4, … in both directions on a ring. The ring is ordered by a hash of the names, so that the nodes of
one rack, which may be lost together, are neighbours by chance only. Links are mutual: what one member tells those who
watch it reaches everybody in about log2(N) steps when each passes it on. A departure moves the others on the ring by
one place at most, which changes about one link of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

FULL_MESH = 16
"""Members up to which each watches every other one."""
TAKEOVER_SECONDS = 3.0
"""Seconds that the first in line has for gathering before the second joins in; then twice as many, and so on."""


def is_partial(members: int) -> bool:
    """Return whether so many members are too many for each to watch every other one."""
    return members > FULL_MESH


def neighbours_of(member: str, members: Iterable[str]) -> frozenset[str]:
    """Return those of ``members`` that ``member`` watches, and that watch it. A member that is not among them is placed
    as if it were."""
    names = frozenset(members) | {member}
    if not is_partial(len(names)):
        return names - {member}
    ring = _ring(names)
    place, size, found = ring.index(member), len(ring), set()
    distance = 1
    while distance <= size // 2:
        found |= {ring[(place + distance) % size], ring[(place - distance) % size]}
        distance *= 2
    return frozenset(found)


@lru_cache(maxsize=4)
def _ring(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()))


def count_acting(waited_seconds: float) -> int:
    """Return how many in line may gather after the first of them has had so many seconds: one, two after
    `TAKEOVER_SECONDS`, and one more each time that as long has passed again. So a line of any length has its turn, and
    few act at a time."""
    count, due = 1, TAKEOVER_SECONDS
    while waited_seconds >= due:
        count, due = count + 1, 2 * due
    return count

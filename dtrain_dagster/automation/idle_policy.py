"""How long nodes have stood without work, what that has cost, and when to have them scaled down. Pure.

Time is added up from look to look, never taken from the clock alone: so it survives a restart of whoever looks, and a
clock that is set forward or back shifts it by `LONGEST_LOOK_SECONDS` at most. What nobody has watched is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dtrain_dagster.clusters.base import NodePool

LONGEST_LOOK_SECONDS = 180.0
"""What may have passed between two looks at most; the sensor looks each minute."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 1800.0
"""Before a scale-down that failed is tried again."""
LEAVING_SECONDS = 300.0
"""For so long nodes may take to go after it was asked for."""
GENTLE_TRIES = 2

Outcome = Literal["", "scaled down", "asked for", "failed", "in use"]
"""What came of the last try; "" before the first. "in use": it is not idle, though it looks so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Idling:
    """What is remembered of a pool from one look to the next."""

    seen_at: float
    """The last look; Unix seconds."""
    used_at: float | None
    """`NodePool.used_at`, as it was then."""
    idle_seconds: float = 0.0
    wasted_usd: float = 0.0
    tries: int = 0
    """Scale-downs that were not refused for work."""
    next_try_seconds: float = 0.0
    """Not before it has idled for so long."""
    outcome: Outcome = ""
    told: bool = False
    """Has a person been told of this stretch?"""


def look(before: Idling | None, pool: NodePool, usd_per_node_hour: float, now: float) -> Idling:
    """A pool after one more look. A job that began and ended since the last one ends a stretch as well."""
    fresh = Idling(seen_at=now, used_at=pool.used_at)
    if before is None or pool.work or not pool.node_count:
        return fresh
    passed = min(max(now - before.seen_at, 0.0), LONGEST_LOOK_SECONDS)
    if pool.used_at is not None and pool.used_at != before.used_at:
        idle, since = fresh, min(max(now - pool.used_at, 0.0), passed)
    else:
        idle, since = replace(before, seen_at=now, used_at=pool.used_at), passed
    usd = since / 3600 * pool.node_count * usd_per_node_hour
    return replace(idle, idle_seconds=idle.idle_seconds + since, wasted_usd=idle.wasted_usd + usd)


def is_over(idling: Idling, pool: NodePool, limit_seconds: float) -> bool:
    """Has it stood without work for longer than the limit, and nobody else takes care of it?"""
    return bool(pool.node_count) and not pool.work and idling.idle_seconds >= limit_seconds + pool.grace_seconds


def is_pool_due(idling: Idling, pool: NodePool, limit_seconds: float) -> bool:
    """Is it to be scaled down now?"""
    return is_over(idling, pool, limit_seconds) and idling.idle_seconds >= idling.next_try_seconds


def takes_force(idling: Idling) -> bool:
    """Was it asked for in vain?"""
    return idling.outcome == "asked for" or idling.tries >= GENTLE_TRIES


def tried(idling: Idling, outcome: Outcome) -> Idling:
    """After a try, whatever came of it."""
    pause = LEAVING_SECONDS
    if outcome == "failed":
        pause = min(FIRST_PAUSE_SECONDS * 2**idling.tries, LONGEST_PAUSE_SECONDS)
    tries = idling.tries + (outcome != "in use")
    return replace(idling, outcome=outcome, tries=tries, next_try_seconds=idling.idle_seconds + pause)

"""The idle policy: how long nodes have stood without work, what that has cost, and when to scale them down. Pure.

Time is added up from look to look, by the kernel's count and never by the clock alone. So the sum survives a restart of
the observer, is whole where it looks seldom, and a clock that is set does not change it. Where the count cannot tell
(the observer's machine was started again, or is another one), `LONGEST_LOOK_SECONDS` at most are added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dtrain_dagster.clusters.base import NodePool

LONGEST_LOOK_SECONDS = 180.0
"""The longest time between two looks that is added where only the clock tells it; the sensor looks each minute."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 60.0, 1800.0
"""The pause after a failed scale-down: the first one, and the bound up to which it doubles."""
LEAVING_SECONDS = 300.0
"""The time that nodes may take to go after a scale-down was asked for."""
GENTLE_TRIES = 2

Outcome = Literal["", "scaled down", "asked for", "failed", "in use"]
"""The result of the last try; "" before the first. "in use": the pool is not idle, though it looks so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Idling:
    """A pool's idle state, kept from one look to the next."""

    seen_at: float
    """The time of the last look; Unix seconds."""
    used_at: float | None
    """`NodePool.used_at` at the last look."""
    idle_seconds: float = 0.0
    wasted_usd: float = 0.0
    tries: int = 0
    """The number of scale-downs that were not refused because of work."""
    next_try_seconds: float = 0.0
    """The idle time before which no further try is made."""
    outcome: Outcome = ""
    told: bool = False
    """Whether a person has been told of this idle interval."""


def look(
    before: Idling | None, pool: NodePool, usd_per_node_hour: float, now: float, elapsed: float | None = None
) -> Idling:
    """Return a pool's idle state after one more look. A job that began and ended since the last look ends the interval
    too. ``elapsed``: the seconds since then by the kernel's count; None where it cannot tell."""
    fresh = Idling(seen_at=now, used_at=pool.used_at)
    if before is None or pool.work or not pool.node_count:
        return fresh
    passed = min(now - before.seen_at, LONGEST_LOOK_SECONDS) if elapsed is None else elapsed
    passed = max(passed, 0.0)
    if pool.used_at is not None and pool.used_at != before.used_at:
        idle, since = fresh, min(max(now - pool.used_at, 0.0), passed)
    else:
        idle, since = replace(before, seen_at=now, used_at=pool.used_at), passed
    usd = since / 3600 * pool.node_count * usd_per_node_hour
    return replace(idle, idle_seconds=idle.idle_seconds + since, wasted_usd=idle.wasted_usd + usd)


def is_over(idling: Idling, pool: NodePool, limit_seconds: float) -> bool:
    """Return whether the pool has idled for longer than the limit and its own grace time."""
    return bool(pool.node_count) and not pool.work and idling.idle_seconds >= limit_seconds + pool.grace_seconds


def is_pool_due(idling: Idling, pool: NodePool, limit_seconds: float) -> bool:
    """Return whether the pool is to be scaled down now."""
    return is_over(idling, pool, limit_seconds) and idling.idle_seconds >= idling.next_try_seconds


def takes_force(idling: Idling) -> bool:
    """Return whether gentle scale-downs have failed, so that the next one must not be gentle."""
    return idling.outcome == "asked for" or idling.tries >= GENTLE_TRIES


def tried(idling: Idling, outcome: Outcome) -> Idling:
    """Return the idle state after a try with this outcome."""
    pause = LEAVING_SECONDS
    if outcome == "failed":
        pause = min(FIRST_PAUSE_SECONDS * 2**idling.tries, LONGEST_PAUSE_SECONDS)
    tries = idling.tries + (outcome != "in use")
    return replace(idling, outcome=outcome, tries=tries, next_try_seconds=idling.idle_seconds + pause)

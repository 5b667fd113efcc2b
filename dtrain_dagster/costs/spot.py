"""What is known of a Spot price beyond the figure of one day: how far it has moved, and how often nodes are evicted.
Pure. `dtrain_dagster.costs.retail` asks Azure for both."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from typing import Any

HISTORY_DAYS = 90
"""Days of a price's history that count: as many as Azure keeps."""
LEAST_HISTORY_DAYS = 7
"""A history of fewer days says nothing of the spread of a price."""
_BAND = re.compile(r"(\d{1,3})\s*-\s*(\d{1,3})")
_OPEN_BAND = re.compile(r"(\d{1,3})\s*\+")


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceSpread:
    """The lowest and the highest of the prices of some time, in US dollars per node and hour."""

    low: float
    high: float
    since: str
    """First day of that time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionRate:
    """The share of the Spot nodes of a size that are evicted in an hour, in one region: a band, as Azure publishes it
    for the last 28 days."""

    low: float
    high: float | None
    """None where the band has no upper end (20 % or more)."""
    recorded_on: str
    source: str

    @property
    def expected(self) -> float:
        """Return the middle of the band; its lower end where it has no upper one."""
        return self.low if self.high is None else (self.low + self.high) / 2

    @property
    def most(self) -> float:
        """Return the upper end of the band; its lower end where it has no upper one."""
        return self.low if self.high is None else self.high

    def __str__(self) -> str:
        if self.high is None:
            return f"{100 * self.low:g} % or more"
        return f"{100 * self.low:g} to {100 * self.high:g} %"


def parse_eviction_band(text: str) -> tuple[float, float | None] | None:
    """Return the ends of a band as Azure writes it (``5-10``, ``20+``), as shares; None for anything else."""
    if found := _BAND.fullmatch(text.strip()):
        low, high = int(found[1]) / 100, int(found[2]) / 100
        return (low, high) if low < high <= 1 else None
    found = _OPEN_BAND.fullmatch(text.strip())
    return (int(found[1]) / 100, None) if found and int(found[1]) <= 100 else None


def kept_history(points: Iterable[tuple[str, float]], day: str) -> tuple[tuple[str, float], ...]:
    """Return the prices of the `HISTORY_DAYS` before ``day``, the oldest first, and the one that held when they began.
    ``points``: (day from which a price held, US dollars per hour); of several on one day the last counts."""
    by_day = sorted(dict(points).items())
    first = (date.fromisoformat(day) - timedelta(days=HISTORY_DAYS)).isoformat()
    before = [point for point in by_day if point[0] <= first]
    return tuple([*before[-1:], *(point for point in by_day if point[0] > first)])


def spread_of(history: Sequence[tuple[str, float]], usd_per_hour: float, day: str) -> PriceSpread | None:
    """Return the spread of a price up to ``day``, on which it is ``usd_per_hour``; None where too little is known."""
    if not history:
        return None
    until = date.fromisoformat(day)
    since = max(date.fromisoformat(history[0][0]), until - timedelta(days=HISTORY_DAYS))
    if (until - since).days < LEAST_HISTORY_DAYS:
        return None
    prices = [usd_per_hour, *(usd for _, usd in kept_history(history, day))]
    return PriceSpread(low=min(prices), high=max(prices), since=since.isoformat())


def as_extras(history: Sequence[tuple[str, float]], evictions: EvictionRate | None) -> dict[str, Any]:
    """Return both as a table of prices has them behind a figure; empty where neither is known."""
    known: dict[str, Any] = {"history": [list(point) for point in history]} if history else {}
    return known | ({"evictions": asdict(evictions)} if evictions else {})


def read_extras(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``history`` and ``evictions`` of a figure from a table of prices. Raise ValueError, TypeError or KeyError
    where they cannot be read."""
    history = tuple((date.fromisoformat(day).isoformat(), float(usd)) for day, usd in document.get("history", ()))
    if not all(0 < usd < math.inf for _, usd in history):
        raise ValueError(f"the history {history} has an entry that is not a price")
    rate = document.get("evictions")
    return {"history": history, "evictions": EvictionRate(**rate) if rate else None}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotMarket:
    """What Azure tells of Spot in one region, by SKU as `dtrain_dagster.costs.prices` spells it."""

    history: Mapping[str, Sequence[tuple[str, float]]]
    """Prices: (day from which it held, US dollars per node and hour)."""
    evictions: Mapping[str, EvictionRate]

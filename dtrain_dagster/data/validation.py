"""The checks that prices can be trained on. One pass over the tickers; faults are refused, masked, or reported. That
prices are finite, and days unique and in order, `dtrain_dagster.data.prices` has seen to as it wrote them.

An *error* would make training on the data wrong. A *warning* is something a person should know. A *mask* is a segment
of one ticker that no window may touch.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dtrain_dagster.data.errors import DataError
from dtrain_dagster.data.prices import PricesRef, iter_tickers

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

STALE_DAYS = 5
MASKED_STALE_DAYS = 20
"""The days of an unchanged price from which on it is masked as no real price; a halt of a week may be real."""
LARGE_MOVE = 0.35
SPLIT_TOLERANCE = 0.03
"""How far from a whole ratio a jump may be: the price moves on the day of a split, too."""
GAP_DAYS_WITHOUT_CALENDAR = 7

CHECKS = {
    "positive_prices": ("error", "Each price is a number above zero: its logarithm would not exist otherwise."),
    "unique_sorted_rows": ("error", "Each ticker has its days in order, each of them once."),
    "trading_sessions": ("error", "No row falls on a day on which the exchange was closed."),
    "calendar_gaps": (
        "warning",
        "No ticker misses a session between its first day and its last; windows never cross one.",
    ),
    "stale_prices": ("warning", f"No price stands still for more than {STALE_DAYS} sessions."),
    "large_moves": ("warning", f"No daily log return is beyond {LARGE_MOVE}."),
    "split_like_jumps": (
        "warning",
        "No large move is close to a whole ratio, as an unadjusted split would be; its day is masked.",
    ),
    "survivorship": ("warning", "Some ticker ends before the others: the panel is not survivors only."),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of one check: pass or fail, severity, and its findings as metadata."""

    name: str
    passed: bool
    severity: str
    description: str
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """A segment of one ticker, first and last day included, that no window may touch."""

    ticker: str
    first: str
    last: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The results of all checks, and the masks that follow from them."""

    checks: tuple[CheckResult, ...]
    masks: tuple[Mask, ...]


@dataclass(slots=True)
class _Findings:
    """The findings by check; only the first few of each are kept, all are counted."""

    count: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, check: str, examples: list[str], count: int | None = None) -> None:
        self.count[check] += len(examples) if count is None else count
        self.examples[check] += examples[: max(0, 5 - len(self.examples[check]))]


def validate_prices(ref: PricesRef, calendar: str | None = "XNYS") -> Validation:
    """Evaluate every check of `CHECKS` and return all results. ``calendar``: an exchange's code, or None / "none"."""
    sessions = exchange_sessions(calendar, ref.first_date, ref.last_date)
    findings, masks, ends = _Findings(), [], []
    for ticker, frame in iter_tickers(ref):
        ends.append(str(frame["date"].iloc[-1].date()))
        _check_calendar(findings, ticker, frame, sessions)
        bad = frame.loc[~frame["adj_close"].between(0, float("inf"), inclusive="neither"), "date"]
        findings.add("positive_prices", [f"{ticker} {day.date()}" for day in bad])
        masks += _check_moves(findings, ticker, frame)
    if len(ends) > 1 and len(set(ends)) == 1:
        findings.add("survivorship", [f"all {len(ends)} tickers survive to {ends[0]}"])
    checks = tuple(
        CheckResult(
            name=name,
            passed=not findings.count[name],
            severity=severity,
            description=description,
            metadata={"found": findings.count[name], "examples": findings.examples[name]},
        )
        for name, (severity, description) in CHECKS.items()
    )
    return Validation(checks=checks, masks=tuple(masks))


def exchange_sessions(calendar: str | None, first: str, last: str) -> NDArray[np.datetime64] | None:
    """Return the trading days of an exchange between two dates; None where no calendar applies. Raise `DataError` for
    an unknown calendar or one that does not cover the dates."""
    return None if calendar is None or calendar.lower() == "none" else _sessions(calendar, first, last)


@lru_cache(maxsize=16)
def _sessions(calendar: str, first: str, last: str) -> NDArray[np.datetime64]:
    """Return them, not to be changed. A calendar takes tenths of a second, and checks and dataset ask for the same."""
    import exchange_calendars as xc
    import numpy as np

    end = np.datetime64(last, "D")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of pandas, about how this package uses it
            # A day longer, as a calendar of one day is refused.
            sessions = xc.get_calendar(calendar, start=first, end=str(end + 1)).sessions
    except xc.errors.InvalidCalendarName as error:
        raise DataError(
            f"calendar={calendar!r} (DTRAIN_OPTIONS) is not an exchange calendar: use a code such as XNYS or "
            "XLON, or none"
        ) from error
    except ValueError as error:
        raise DataError(f"calendar={calendar!r} (DTRAIN_OPTIONS) does not cover {first} to {last}: {error}") from error
    days = np.asarray(sessions.values, dtype="datetime64[D]")
    days = days[days <= end]
    days.flags.writeable = False
    return days


def gaps(dates: NDArray[np.datetime64], sessions: NDArray[np.datetime64] | None) -> NDArray[np.bool_]:
    """Return for each of a ticker's days (n,) whether sessions were missed since the day before; False for the
    first."""
    import numpy as np

    if sessions is None:
        steps = np.diff(dates).astype(int)
        return np.concatenate([[False], steps > GAP_DAYS_WITHOUT_CALENDAR])
    place = np.searchsorted(sessions, dates)
    return np.concatenate([[False], np.diff(place) > 1])


def _check_calendar(
    findings: _Findings, ticker: str, frame: pd.DataFrame, sessions: NDArray[np.datetime64] | None
) -> None:
    import numpy as np

    dates = frame["date"].to_numpy().astype("datetime64[D]")
    if sessions is not None:
        closed = dates[~np.isin(dates, sessions)]
        findings.add("trading_sessions", [f"{ticker} {date}" for date in closed])
    again = dates[1:][np.diff(dates) <= np.timedelta64(0, "D")]
    findings.add("unique_sorted_rows", [f"{ticker} {date}" for date in again])
    after_gap = dates[gaps(dates, sessions)]
    findings.add("calendar_gaps", [f"{ticker}: sessions are missing before {date}" for date in after_gap])


def _check_moves(findings: _Findings, ticker: str, frame: pd.DataFrame) -> list[Mask]:
    """Find stale segments and jumps; return masks for segments too long to be a halt, with the jump that ends them, and
    for the days of other jumps like splits."""
    import numpy as np

    dates = frame["date"].to_numpy().astype("datetime64[D]")
    prices = frame["adj_close"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        moves = np.diff(np.log(prices), prepend=np.nan)
    large = np.abs(moves) > LARGE_MOVE
    split_like = large & _near_whole_ratio(moves)
    findings.add("large_moves", [f"{ticker} {dates[row]}: {moves[row]:+.2f}" for row in np.flatnonzero(large)])
    findings.add(
        "split_like_jumps",
        [f"{ticker} {dates[row]}: ratio {np.exp(moves[row]):.3f}" for row in np.flatnonzero(split_like)],
    )
    still = moves == 0
    masks = []
    for first, last in _runs(still):
        length = last - first + 1
        if length <= STALE_DAYS:
            continue
        findings.add("stale_prices", [f"{ticker}: {length} sessions from {dates[first - 1]}"])
        if length > MASKED_STALE_DAYS:
            jump = last + 1 < len(moves) and split_like[last + 1]
            reason = f"the price stands still for {length} sessions" + (
                f", then jumps by a ratio of {np.exp(moves[last + 1]):.2f}" if jump else ""
            )
            masks.append(Mask(ticker=ticker, first=str(dates[first - 1]), last=str(dates[last + jump]), reason=reason))
            split_like[last + 1 : last + 1 + jump] = False
    for row in np.flatnonzero(split_like):  # without that day, no return is that of the jump
        reason = f"the price jumps by a ratio of {np.exp(moves[row]):.3g}, like a split that is not adjusted"
        masks.append(Mask(ticker=ticker, first=str(dates[row]), last=str(dates[row]), reason=reason))
    return masks


def _near_whole_ratio(moves: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether exp(move), or its inverse, is close to 2, 3, 4 …"""
    import numpy as np

    ratio = np.exp(np.minimum(np.abs(np.nan_to_num(moves)), 50))
    whole = np.round(ratio)
    return (whole >= 2) & (np.abs(ratio / np.maximum(whole, 1) - 1) < SPLIT_TOLERANCE)


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of True."""
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    return [(int(first), int(stop) - 1) for first, stop in zip(edges[::2], edges[1::2], strict=True)]

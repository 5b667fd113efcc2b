"""Scores of a forecast as pure functions of arrays (days, targets, forecasts). Numpy only."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def daily_means(values: Array, days: NDArray) -> Array:
    """Return the mean of ``values`` (n,) over each distinct day, in order of days."""
    _, index = np.unique(days, return_inverse=True)
    return np.bincount(index, weights=values) / np.bincount(index)


def newey_west_t(series: Array, lag: int) -> float | None:
    """Return the t-statistic of the mean of an autocorrelated series (Newey and West 1987, Bartlett weights up to
    ``lag``).

    Samples that share a day are one observation (take `daily_means` before), and labels that look ``horizon`` days
    ahead overlap, so ``lag`` must be at least the horizon. None where there are too few days or no variance.
    """
    n = len(series)
    if n <= lag + 2:
        return None
    centred = series - series.mean()
    variance = float(centred @ centred) / n
    for shift in range(1, lag + 1):
        variance += 2 * (1 - shift / (lag + 1)) * float(centred[shift:] @ centred[:-shift]) / n
    return float(series.mean()) / math.sqrt(variance / n) if variance > 0 else None


def newey_west_lag(days: int, horizon: int) -> int:
    """Return the usual lag in days, 4 (n / 100)^(2/9), and never below twice the overlap of the labels."""
    return max(2 * horizon, math.floor(4 * (days / 100) ** (2 / 9)))


def ranks_within_days(values: Array, days: NDArray) -> Array:
    """Return the rank of each value among those of its day, ties sharing their mean rank; zero-based, shape (n,)."""
    order = np.lexsort((values, days))
    v, d = values[order], days[order]
    new_day = np.r_[True, d[1:] != d[:-1]]
    new_tie = new_day | np.r_[True, v[1:] != v[:-1]]
    first_of_day = np.flatnonzero(new_day)[np.cumsum(new_day) - 1]
    starts = np.flatnonzero(new_tie)
    ends = np.r_[starts[1:], len(v)] - 1
    mean_position = ((starts + ends) / 2)[np.cumsum(new_tie) - 1]
    ranks = np.empty(len(v))
    ranks[order] = mean_position - first_of_day
    return ranks


def rank_ic_by_day(mu: Array, target: Array, days: NDArray) -> Array:
    """Return the Spearman correlation over the tickers of each day; days with fewer than three, or no spread, are left
    out."""
    _, index, counts = np.unique(days, return_inverse=True, return_counts=True)
    a, b = ranks_within_days(mu, days), ranks_within_days(target, days)
    mean = (counts - 1) / 2  # of the ranks 0 .. count - 1
    a, b = a - mean[index], b - mean[index]
    saa, sbb, sab = (np.bincount(index, weights=product) for product in (a * a, b * b, a * b))
    usable = (counts >= 3) & (saa > 0) & (sbb > 0)
    return sab[usable] / np.sqrt(saa[usable] * sbb[usable])


def direction_scores(mu: Array, target: Array) -> Array | None:
    """Return a score per sample whose mean is the balanced accuracy of the direction: both classes weigh one half.

    ``mu`` and ``target`` are demeaned first, so ``always up`` and a drifting market score 0.5. None where one class is
    empty or the forecast is constant.
    """
    if len(mu) == 0 or np.ptp(mu) == 0:
        return None
    predicted, up = mu > mu.mean(), target > target.mean()
    if up.all() or not up.any():
        return None
    weight = np.where(up, 0.5 / up.mean(), 0.5 / (1 - up.mean()))
    return (predicted == up) * weight


def mean_skill(mu: Array, target: Array, days: NDArray, horizon: int) -> dict[str, float | None]:
    """Return the skill of the mean forecast: rank IC, balanced accuracy and squared error against zero, with
    t-statistics (of the mean; of accuracy above one half; of the squared error saved)."""
    count = len(np.unique(days))
    lag = newey_west_lag(count, horizon)
    ic = rank_ic_by_day(mu, target, days)
    hits = direction_scores(mu, target)
    saved = daily_means(target**2 - (target - mu) ** 2, days)
    return {
        "rank_ic": float(ic.mean()) if len(ic) else None,
        "rank_ic_t": newey_west_t(ic, lag),
        "balanced_accuracy": None if hits is None else float(hits.mean()),
        "balanced_accuracy_t": None if hits is None else newey_west_t(daily_means(hits - 0.5, days), lag),
        "mse_to_zero": mse_to_zero(mu, target),
        "mse_to_zero_t": newey_west_t(saved, lag),
    }


def mse_to_zero(mu: Array, target: Array) -> float | None:
    """Return the mean squared error of ``mu`` as a fraction of that of forecasting zero."""
    zero = float(np.mean(target**2))
    return float(np.mean((target - mu) ** 2)) / zero if zero > 0 else None


def halves(days: NDArray) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks of the earlier and the later half of the distinct days."""
    distinct = np.unique(days)
    middle = distinct[len(distinct) // 2]
    return days < middle, days >= middle


def quintiles(values: Array) -> NDArray[np.int64]:
    """Return the fifth, 0 to 4, to which each value belongs, by rank."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks * 5 // max(1, len(values))

"""The daily figures of test years, from a model's forecasts and each year's dataset, and all years judged together.

Baselines are fitted on the training days of the same dataset. For `benchmarks.model`; `examples.walk_forward` judges
years by what their own evaluations say.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.manifest import SPLITS
from trainer.data.sampler import spread_positions
from trainer.data.shards import DataShardManager
from trainer.evaluation.window_report import Predictions, judge_baselines, score_forecast
from trainer.evaluation.window_scores import Array, daily_means, newey_west_lag, newey_west_t

REGIMES = ("calm", "turbulent")
VOLATILITY = "index_log_rv_22"
"""The feature by which days are calm or turbulent: the index's volatility over the last 22 days."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YearScores:
    """The daily figures of one test year, in order of days; each is a mean over that day's windows."""

    year: int
    days: NDArray[np.datetime64]
    """(d,) The days on which the windows end, datetime64[D]."""
    windows: NDArray[np.int64]
    """(d,) The number of windows of each day."""
    nll: Array
    """(d,) Negative log-likelihood of the model, in nats."""
    coverage_90: Array
    """(d,) The share of outcomes inside the model's 90 % interval."""
    baselines: Mapping[str, Array]
    """(d,) Negative log-likelihood of each baseline, fitted on the training days of this year."""
    turbulent: NDArray[np.bool_] | None = None
    """(d,) `turbulent_days`; None where the index's volatility is not known."""
    horizon: int = 5
    """Days from a window's end to the end of its label, which overlap."""


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much the model's likelihood is better than another's."""

    nats: float
    """The mean over windows; positive where the model is better."""
    t: float | None
    """Its t-statistic over days (`newey_west_t`); None for too few days."""


def score_predictions(
    year: int,
    predictions: Predictions,
    shards: DataShardManager,
) -> YearScores:
    """Return the daily figures of forecasts for the test split of the year's dataset. Raise ValueError where the
    forecasts are no distribution, which alone has a likelihood."""
    target = shards.column(shards.spec.target, predictions.row).astype(np.float64)
    own = score_forecast(predictions.predictive, target)
    if not own:
        raise ValueError("the loss predicts no distribution, so years cannot be compared by likelihood")
    days = shards.dates(predictions.row).astype("datetime64[D]")
    distinct, counts = np.unique(days, return_counts=True)
    turbulent, baselines = market_regimes(shards), judge_baselines(shards, "test")
    return YearScores(
        year=year,
        days=distinct,
        windows=counts.astype(np.int64),
        nll=daily_means(own["nll"], days),
        coverage_90=daily_means(own["coverage_90"], days),
        baselines={name: daily_means(item.nll, days) for name, item in baselines.items() if item.nll is not None},
        turbulent=None if turbulent is None else np.array([turbulent[day] for day in distinct], dtype=bool),
        horizon=shards.spec.horizon,
    )


def market_regimes(shards: DataShardManager) -> dict[np.datetime64, bool] | None:
    """Return for each day on which a window of any split ends whether it was turbulent (`turbulent_days`); None for a
    dataset without the index's volatility."""
    if VOLATILITY not in shards.spec.features:
        return None
    parts = (shards.end_rows(split, spread_positions(shards.count(split))) for split in SPLITS)
    rows = np.concatenate(list(parts))
    days, first = np.unique(shards.dates(rows).astype("datetime64[D]"), return_index=True)
    flags = turbulent_days(shards.column(VOLATILITY, rows[first]).astype(np.float64))
    return dict(zip(days, flags.tolist(), strict=True))


def turbulent_days(volatility: Array) -> NDArray[np.bool_]:
    """Return for each day (d,), in order, whether the market's volatility, as it was known that day, was above the
    median of all days before it. The first day has none before it, and is calm. No later day is looked at."""
    before: list[float] = []
    found = np.zeros(len(volatility), dtype=bool)
    for place, value in enumerate(volatility.tolist()):
        if before:
            found[place] = value > statistics.median(before)
        bisect.insort(before, value)
    return found


def gain_over(nll: Array, other: Array, windows: NDArray[np.int64], horizon: int) -> Gain:
    """Return the gain of a model with daily means ``nll`` (d,) over another with ``other`` (d,)."""
    difference = other - nll
    t = newey_west_t(difference, newey_west_lag(len(difference), horizon)) if len(difference) else None
    return Gain(float(np.average(difference, weights=windows)) if len(difference) else 0.0, t)


@dataclass(slots=True)
class _Joined:
    """The days of several years, one after the other. Between two years as many days are missing as labels are long."""

    years: Sequence[YearScores]
    nll: Array = field(init=False)
    coverage: Array = field(init=False)
    windows: NDArray[np.int64] = field(init=False)
    horizon: int = field(init=False)

    def __post_init__(self) -> None:
        self.nll, self.coverage = (
            np.concatenate([getattr(year, name) for year in self.years]) for name in ("nll", "coverage_90")
        )
        self.windows = np.concatenate([year.windows for year in self.years])
        self.horizon = max(year.horizon for year in self.years)

    def baselines(self) -> dict[str, Array]:
        """Return the daily figures of the baselines that every year has."""
        names = [name for name in self.years[0].baselines if all(name in year.baselines for year in self.years)]
        return {name: np.concatenate([year.baselines[name] for year in self.years]) for name in names}

    def turbulent(self) -> NDArray[np.bool_] | None:
        """Return which days were turbulent; None where a year does not say."""
        flags = [year.turbulent for year in self.years if year.turbulent is not None]
        return np.concatenate(flags) if len(flags) == len(self.years) else None

    def judged(self, part: Any = slice(None)) -> dict[str, Any]:
        """Return the figures over some of the days."""
        windows, nll = self.windows[part], self.nll[part]
        others = {name: values[part] for name, values in self.baselines().items()}
        return {
            "days": len(nll),
            "windows": int(windows.sum()),
            "nll": float(np.average(nll, weights=windows)),
            "coverage_90": float(np.average(self.coverage[part], weights=windows)),
            "baselines": {name: float(np.average(values, weights=windows)) for name, values in others.items()},
            "gains": {
                name: {"nats": gain.nats, "t": gain.t}
                for name, values in others.items()
                for gain in [gain_over(nll, values, windows, self.horizon)]
            },
        }


def judge_years(years: Sequence[YearScores]) -> dict[str, Any]:
    """Return the report of these test years, as JSON has it: ``all`` of them together, ``by_year`` and ``by_regime``,
    each with the model's and the baselines' likelihoods, the gains with t-statistics, and coverage. Raise
    ValueError for no years, or a year twice."""
    ordered = sorted(years, key=lambda item: item.year)
    if not ordered or len({item.year for item in ordered}) < len(ordered):
        raise ValueError("a walk forward needs at least one test year, and each of them only once")
    joined = _Joined(ordered)
    together, turbulent = joined.judged(), joined.turbulent()
    regimes = {}
    if turbulent is not None:
        parts = zip(REGIMES, (~turbulent, turbulent), strict=True)
        regimes = {name: joined.judged(part) for name, part in parts if part.any()}
    by_year = {str(item.year): _Joined([item]).judged() for item in ordered}
    return {"all": together, "by_year": by_year, "by_regime": regimes}

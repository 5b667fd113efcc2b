"""Walking forward: a model and its baselines, trained again for each test year on what came before, judged together.

All here is a pure function of daily figures, whoever computed them. A year's figures are `YearScores`; `judge_years`
makes one report of several, and `walk_forward_gate` a verdict of that. Numpy only.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.evaluation.gate import CHANCE_T, COVERAGE_HIGH, COVERAGE_LOW, MUST_BEAT, Gate
from trainer.evaluation.window_scores import Array, daily_means, newey_west_lag, newey_west_t

LEAST_YEARS = 5
"""The fewest test years from which a verdict is given."""
REGIMES = ("calm", "turbulent")


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

    @property
    def low_high(self) -> tuple[float, float] | None:
        """Return the 95 % interval; None for too few days."""
        if not self.t:
            return None
        half = 1.96 * abs(self.nats / self.t)
        return self.nats - half, self.nats + half

    def document(self) -> dict[str, Any]:
        """Return the figures as JSON has them."""
        low, high = self.low_high or (None, None)
        return {"nats": self.nats, "t": self.t, "low": low, "high": high}


def score_year(
    year: int,
    days: NDArray[np.datetime64],
    nll: Array,
    coverage_90: Array,
    baselines: Mapping[str, Array],
    horizon: int,
    turbulent: Mapping[np.datetime64, bool] | None = None,
) -> YearScores:
    """Return the daily figures of windows: ``days`` (n,) their last days, the others (n,) each window's own figure.
    ``turbulent``: whether each day was (`turbulent_days`)."""
    distinct, counts = np.unique(days.astype("datetime64[D]"), return_counts=True)
    return YearScores(
        year=year,
        days=distinct,
        windows=counts.astype(np.int64),
        nll=daily_means(nll, days),
        coverage_90=daily_means(coverage_90, days),
        baselines={name: daily_means(values, days) for name, values in baselines.items()},
        turbulent=None if turbulent is None else np.array([turbulent[day] for day in distinct], dtype=bool),
        horizon=horizon,
    )


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
                name: gain_over(nll, values, windows, self.horizon).document() for name, values in others.items()
            },
        }


def judge_years(years: Sequence[YearScores]) -> dict[str, Any]:
    """Return the report of these test years, as JSON has it: ``all`` of them together, ``by_year`` and ``by_regime``,
    each with the model's and the baselines' likelihoods, the gains with t-statistics and 95 % intervals, and coverage;
    and ``best_baseline``, by likelihood. Raise ValueError for no years, or a year twice."""
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
    likelihoods = together["baselines"]
    return {
        "years": [item.year for item in ordered],
        "first_date": str(ordered[0].days[0]),
        "last_date": str(ordered[-1].days[-1]),
        "all": together,
        "by_year": by_year,
        "by_regime": regimes,
        "best_baseline": min(likelihoods, key=lambda name: likelihoods[name]) if likelihoods else None,
        "years_won": {name: sum(year["gains"][name]["nats"] > 0 for year in by_year.values()) for name in likelihoods},
    }


def walk_forward_gate(report: Mapping[str, Any], least_years: int = LEAST_YEARS) -> Gate:
    """Judge a report of `judge_years`: over all its years together no baseline is better beyond chance, EWMA and HAR-X
    are worse beyond chance, and the 90 % interval covers what it should. Fewer years than ``least_years`` do not
    pass."""
    together, reasons = report["all"], []
    if len(report["years"]) < least_years:
        reasons.append(f"{len(report['years'])} test year(s): at least {least_years} are judged")
    for name, gain in together["gains"].items():
        t = gain["t"] or 0.0
        if name in MUST_BEAT and t <= CHANCE_T:
            reasons.append(f"it is not better than {name} beyond chance ({gain['nats']:+.4f} nats, t = {t:.1f})")
        elif t < -CHANCE_T:
            reasons.append(f"{name} is better beyond chance ({-gain['nats']:.4f} nats, t = {t:.1f})")
    reasons += [f"the baseline {name} is missing" for name in MUST_BEAT if name not in together["gains"]]
    coverage = together["coverage_90"]
    if not COVERAGE_LOW <= coverage <= COVERAGE_HIGH:
        reasons.append(f"the 90 % interval covers {coverage:.3f}, outside [{COVERAGE_LOW}, {COVERAGE_HIGH}]")
    return Gate(not reasons, tuple(reasons))

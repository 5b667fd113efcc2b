"""The chart of a walk forward: what each year brought over each baseline, and all years up to each day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dtrain_dagster.registry.walk_forward import YearScores, gain_over
from dtrain_dagster.reports.drawing import COLOURS, MUTED, label, new_figure, svg
from trainer.evaluation.window_scores import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"ridge": "ridge", "har_x": "HAR-X", "har": "HAR", "ewma": "EWMA", "constant": "constant", "last_value": "last"}
SPREAD = 0.22
"""The distance of the bars of one year, in years."""


def walk_forward_chart(years: Sequence[YearScores], baselines: Sequence[str]) -> bytes:
    """Return `walk_forward_figure` as SVG."""
    return svg(walk_forward_figure(years, baselines))


def walk_forward_figure(years: Sequence[YearScores], baselines: Sequence[str]) -> Figure:
    """Return a figure: above the gain of each year over these baselines with 95 % intervals, below the gain of all days
    up to each, added up. Turbulent days are shaded. Raise ValueError where no year has any of these baselines."""
    ordered = sorted(years, key=lambda item: item.year)
    shown = [name for name in baselines if all(name in item.baselines for item in ordered)]
    if not shown:
        raise ValueError(f"there is no baseline {' or '.join(baselines)} that all years have")
    figure = new_figure(10, 6.4)
    upper, lower = figure.subplots(2, 1, height_ratios=(1.15, 1))
    for place, name in enumerate(shown):
        _draw_years(upper, ordered, name, (place - (len(shown) - 1) / 2) * SPREAD, COLOURS[place])
        _draw_sum(lower, ordered, name, COLOURS[place])
    upper.axhline(0, color=MUTED, linewidth=1)
    upper.set_xticks([item.year for item in ordered])
    upper.tick_params(axis="x", rotation=90 if len(ordered) > 12 else 0)
    upper.set_xlim(ordered[0].year - 0.7, ordered[-1].year + 0.7)
    label(upper, "Gain over each baseline by test year (above zero: the model is better)", "", "nats per window")
    lower.axhline(0, color=MUTED, linewidth=1)
    _shade_turbulent(lower, ordered)
    label(lower, "Gain of all days up to each, added up", "day", "nats, mean over tickers")
    handles, labels = upper.get_legend_handles_labels()
    extra_handles, extra_labels = lower.get_legend_handles_labels()
    turbulent = [(h, t) for h, t in zip(extra_handles, extra_labels, strict=True) if t == "turbulent days"]
    figure.legend(
        [*handles, *(h for h, _ in turbulent)], [*labels, *(t for _, t in turbulent)], frameon=False, fontsize=8,
        ncols=5, loc="outside lower center",
    )  # fmt: skip
    return figure


def _draw_years(axis: Axes, years: Sequence[YearScores], name: str, offset: float, colour: str) -> None:
    points = []
    for item in years:
        gain = gain_over(item.nll, item.baselines[name], item.windows, item.horizon)
        low, high = gain.low_high or (gain.nats, gain.nats)
        points.append((item.year + offset, gain.nats, gain.nats - low, high - gain.nats))
    x, y, below, above = np.array(points).T
    axis.errorbar(
        x, y, yerr=(below, above), fmt="o", markersize=4, color=colour, elinewidth=1.2, capsize=2,
        label=f"over {NAMES.get(name, name)}, with 95 % interval",
    )  # fmt: skip


def summed_gains(years: Sequence[YearScores], name: str) -> list[tuple[float, float]]:
    """Return the gain over a baseline of all days up to each, added up, in nats as a mean over tickers; days are
    numbers of days since 1970. Pure."""
    days, total = _summed(sorted(years, key=lambda item: item.year), name)
    return list(zip(days.astype(float).tolist(), total.tolist(), strict=True))


def _summed(years: Sequence[YearScores], name: str) -> tuple[NDArray[np.datetime64], Array]:
    total = np.cumsum(np.concatenate([item.baselines[name] - item.nll for item in years]))
    return np.concatenate([item.days for item in years]), total


def _draw_sum(axis: Axes, years: Sequence[YearScores], name: str, colour: str) -> None:
    days, total = _summed(years, name)
    starts = np.cumsum([0, *(len(item.days) for item in years[:-1])])
    pairs = zip(starts[1:], years, years[1:], strict=False)
    gaps = [start for start, before, item in pairs if item.year > before.year + 1]
    # No line is drawn over years that are missing.
    axis.plot(np.insert(days, gaps, days[gaps]), np.insert(total, gaps, np.nan), color=colour, linewidth=1.4)
    axis.annotate(
        NAMES.get(name, name), (days[-1], total[-1]), xytext=(4, 0), textcoords="offset points", va="center",
        fontsize=8, color=colour,
    )  # fmt: skip


def _shade_turbulent(axis: Axes, years: Sequence[YearScores]) -> None:
    text: str | None = "turbulent days"
    for item in years:
        flags = np.zeros(len(item.days), bool) if item.turbulent is None else item.turbulent
        edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            last = item.days[stop - 1] + np.timedelta64(1, "D")
            axis.axvspan(item.days[first], last, color="#fff1e5", linewidth=0, zorder=0, label=text)
            text = None

"""Charts of dollars: the choices of a plan over time, with the Pareto front, and what a training's dollars bought."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from dtrain_dagster.costs import money
from dtrain_dagster.costs.ledger import Ledger
from dtrain_dagster.costs.money import SECOND, usd
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.planning.choices import Choices, PlanChoice, misses
from dtrain_dagster.reports.charts import COLOURS, INK, MUTED, label, new_figure, svg
from dtrain_dagster.settings.tiers import tier_in_words
from dtrain_dagster.support.formatting import dollars, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_NUMBERED = 12
"""The most choices that get a number and a line in the list beside the chart."""
MANY = 40
"""The number of choices above which only the front, the cheapest and the planned one show their intervals."""
CHEAPEST, LIMIT = "#1a7f37", "#cf222e"
ROOM, LEAST_SPAN = 1.4, 4.0
"""Factors: the room around the outermost figures, and the least ratio of an axis's highest to its lowest figure."""
FAR = 5.0
"""The factor beyond all choices from which on a limit is stated in words and not drawn."""
HOUR, DAY = 3600, 86400
TIMES = (
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
    *(hours * HOUR for hours in (1, 2, 4, 8, 12)),
    *(days * DAY for days in (1, 2, 4, 7, 14, 30, 60, 120, 365)),
)
SUMS = tuple(digit * 10.0**power for power in range(-7, 9) for digit in (1, 2, 5))
"""The possible marks of the axes: powers of ten are not times that people think in."""


def choices_chart(table: Choices) -> bytes:
    """Return an SVG of cost against time of every choice, both on log scales. A line through a point is its interval:
    dollars follow time. Pale points may miss the deadline or the budget."""
    figure = new_figure(11, 4.8)
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.set_yscale("log")
    _points(axis, table)
    front = table.pareto
    axis.plot(
        [row.seconds.expected for row in front],
        [row.usd.expected for row in front],
        color=INK,
        linewidth=1.1,
        linestyle="--",
        zorder=2,
        label="Pareto front",
    )
    _limits(axis, table)
    kinds = axis.get_legend_handles_labels()
    _numbers(axis, table)
    numbers = [pair[len(kinds[0]) :] for pair in axis.get_legend_handles_labels()]
    label(axis, _title(table), "time until trained (log scale)", "US dollars (log scale)")
    axis.grid(visible=False, which="minor")
    # One legend for the numbers and one for the colours.
    listed = figure.legend(*numbers, frameon=False, fontsize=8, loc="outside right upper", handletextpad=0.2)
    for text in listed.get_texts():
        if text.get_text().endswith("cheapest that fits"):
            text.set(color=CHEAPEST, fontweight="bold")
    figure.legend(*kinds, frameon=False, fontsize=8, loc="lower right", ncols=2)
    return svg(figure)


def _points(axis: Axes, table: Choices) -> None:
    kinds = sorted({_kind(row) for row in table.rows})
    for kind, tier in sorted({(_kind(row), row.tier) for row in table.rows}):
        colour, words = COLOURS[kinds.index(kind) % len(COLOURS)], f"{kind}, {tier_in_words(tier)}"
        mine = [row for row in table.rows if (_kind(row), row.tier) == (kind, tier)]
        for pale in (False, True):
            rows = [row for row in mine if bool(misses(row, table.limits)) is pale]
            strength, gap = 0.25 if pale else 1.0, math.nan  # a gap, so that all intervals are one line
            known = [
                row for row in rows if len(table.rows) <= MANY or row.is_pareto or row.is_cheapest or row.is_planned
            ]
            axis.plot(
                [at for row in known for at in (row.seconds.low, row.seconds.high, gap)],
                [at for row in known for at in (row.usd.low, row.usd.high, gap)],
                color=colour,
                linewidth=1.2,
                alpha=0.5 * strength,
                zorder=1,
            )
            axis.plot(
                [row.seconds.expected for row in rows],
                [row.usd.expected for row in rows],
                "o",
                color=colour,
                markersize=6,
                alpha=strength,
                zorder=3,
                markerfacecolor=colour if tier == "dedicated" else "white",
                label=words if rows else None,
            )
            words = "_" if rows else words  # named once
    axis.plot([], [], color=MUTED, linewidth=1.2, label="interval")


def _kind(row: PlanChoice) -> str:
    """Return ``A100`` of ``A100 SXM4 80GB``: there are more makes of a GPU than colours that can be told apart."""
    return row.gpu.split()[0]


def _numbers(axis: Axes, table: Choices) -> None:
    """Number the cheapest choice, the planned one and those of the front, thinned out where it is long; all, where they
    are few."""
    front = [row for row in table.pareto if not (row.is_cheapest or row.is_planned)]
    kept = MOST_NUMBERED - 2
    if len(front) > kept:
        front = [front[round(place * (len(front) - 1) / (kept - 1))] for place in range(kept)]
    few = len(table.rows) <= MOST_NUMBERED // 2
    for number, row in enumerate(
        (row for row in table.rows if few or row.is_cheapest or row.is_planned or row in front), start=1
    ):
        at = [row.seconds.expected], [row.usd.expected]
        words = f"{row.name}: {format_duration(row.seconds.expected)}, {dollars(row.usd.expected)}"
        words += ", this plan" * row.is_planned + ", cheapest that fits" * row.is_cheapest
        colour, size, edge, front_most = (CHEAPEST, 16, 2.4, 2) if row.is_cheapest else (INK, 13, 0.9, 0)
        axis.plot(
            *at, color=colour, marker=f"${number}$", markersize=7, linestyle="none", label=words, zorder=8 + front_most
        )
        axis.plot(
            *at,
            "s" if row.is_planned else "o",
            markersize=size,
            markerfacecolor="white",
            markeredgecolor=colour,
            markeredgewidth=edge,
            zorder=7 + front_most,
        )


def _limits(axis: Axes, table: Choices) -> None:
    """Set both axes' ranges and marks, and draw the limits, with the region beyond them shaded."""
    draw_x = (axis.xaxis, axis.set_xlim, axis.axvline, axis.axvspan)
    draw_y = (axis.yaxis, axis.set_ylim, axis.axhline, axis.axhspan)
    times, sums = [row.seconds for row in table.rows], [row.usd for row in table.rows]
    for (scale, set_range, line, span), intervals, limit, name, write, short, marks in (
        (draw_x, times, table.limits.left_seconds, "deadline", format_duration, _time, TIMES),
        (draw_y, sums, table.limits.left_usd, "budget", dollars, _sum, SUMS),
    ):
        low, high = min(item.low for item in intervals), max(item.high for item in intervals)
        near = limit is not None and low / FAR < limit < high * FAR
        if limit is not None and near:
            low, high = min(low, limit), max(high, limit)
        widen = max(ROOM, (LEAST_SPAN * low / high) ** 0.5)
        low, high = low / widen, high * widen
        if limit is not None:
            words = f"{name}: {write(limit)}" + ("" if near else ", beyond this picture")
            line(limit if near else high * FAR, color=LIMIT, linewidth=1.4, label=words)
            if limit < high:
                span(max(limit, low), high, color=LIMIT, alpha=0.06, zorder=0)
        set_range(low, high)
        shown = [mark for mark in marks if low <= mark <= high]
        shown = shown[:: 1 + len(shown) // 8]
        scale.set_ticks(shown, labels=[short(mark) for mark in shown])
        scale.set_ticks([], minor=True)


def _time(seconds: float) -> str:
    for unit, name in ((DAY, "d"), (HOUR, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def _sum(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 1 else f"${usd:g}"


def _title(table: Choices) -> str:
    pale = "; pale: may miss a limit" if table.limits else ""
    return f"{len(table.rows)} choices ({table.price_words}){pale}"


CAUSE_COLOURS = {
    CostCause.PRODUCTIVE: "#1a7f37",
    CostCause.SCRIPT: "#0a7ea4",
    CostCause.COMMUNICATION: "#cf222e",
    CostCause.WAITING: "#ffaba8",
    CostCause.INPUT: "#9a6700",
    CostCause.CHECKPOINT: "#8250df",
    CostCause.EVALUATION: "#54aeff",
    CostCause.FINISH: "#0969da",
    CostCause.PROBE: "#bf8700",
    CostCause.PROVISIONING: "#d8dee4",
    CostCause.PREFLIGHT: "#afb8c1",
    CostCause.STARTUP: "#8c959f",
    CostCause.LOST: "#24292f",
    CostCause.KEPT: "#bc4c00",
    CostCause.IDLE: "#eac54f",
    CostCause.UNEXPLAINED: "#e85aad",
}
MOST_NODES = 8
"""The most areas that can be told apart."""


def ledger_chart(found: Ledger, words: str) -> bytes:
    """Return an SVG with a bar per cause: dollars, share and time. ``words``: the basis of the dollars, for the
    axis."""
    causes = found.causes()
    figure = new_figure(9, 1.1 + 0.34 * len(causes))
    axis = figure.subplots()
    values = [row.usd for row in causes.values()]
    largest, whole = max(values, default=1.0) or 1.0, found.microseconds or 1
    axis.barh([str(cause) for cause in causes], values, color=[CAUSE_COLOURS[cause] for cause in causes], height=0.66)
    for place, row in enumerate(causes.values()):
        share = row.microseconds / whole
        text = f" {dollars(row.usd)}   {share:.1%}   {format_duration(row.seconds)}"
        axis.text(row.usd, place, text, va="center", fontsize=8, color=INK)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.32 * largest)
    title = f"What {dollars(usd(found.units))} bought: {format_duration(whole / SECOND)} of node-time"
    label(axis, title, f"US dollars ({words})", "")
    axis.grid(visible=False, axis="y")
    return svg(figure)


def over_time_chart(found: Ledger, estimate: tuple[float, float, float] | None, words: str) -> bytes:
    """Return an SVG of the dollars per hour, by cause, and below it of the sum so far, by node, against the estimate
    (low, expected, high). What its probes cost is spent when it begins."""
    figure = new_figure(9, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.15, 1))
    began = found.edges[1] if any(entry.cause is CostCause.PROBE for entry in found.entries) else found.edges[0]
    length = found.edges[-1] - began
    unit, name = next(
        ((size, name) for size, name in ((money.HOUR, "hours"), (60 * SECOND, "minutes")) if length > 3 * size),
        (SECOND, "seconds"),
    )
    at = [max(0, edge - began) / unit for edge in found.edges]
    _by_cause(upper, found, at)
    _by_node(lower, found, at)
    label(upper, "What is spent, by cause", "", "US dollars per hour")
    if estimate:
        low, expected, high = estimate
        lower.axhspan(low, high, color="#fff8c5", zorder=0, label="estimated interval")
        lower.axhline(expected, color=COLOURS[5], linewidth=1.2, linestyle="--", label="estimate")
    lower.set_ylim(bottom=0)
    lower.set_xlim(0, at[-1] or 1.0)
    label(lower, "Spent so far, by node", f"{name} since the first node", "US dollars")
    for axis in (upper, lower):
        handles, names = axis.get_legend_handles_labels()
        axis.legend(
            handles, names, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0
        )
    figure.text(0.995, 0.01, words, ha="right", fontsize=8, color=MUTED)
    return svg(figure)


def _by_cause(axis: Axes, found: Ledger, at: list[float]) -> None:
    rows = found.by_period()
    widths = [end - begin for begin, end in zip(found.edges, found.edges[1:], strict=False)]
    bottom = [0.0] * len(widths)
    for cause in found.causes():
        if cause is CostCause.PROBE:
            continue
        heights = [
            rows[period, cause].units / width / 10**9 if (period, cause) in rows and width else 0.0
            for period, width in enumerate(widths)
        ]
        tops = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.stairs(tops, at, baseline=bottom, fill=True, color=CAUSE_COLOURS[cause], label=str(cause), linewidth=0)
        bottom = tops
    axis.set_ylim(bottom=0)


def _by_node(axis: Axes, found: Ledger, at: list[float]) -> None:
    nodes = sorted({entry.node_id for entry in found.entries})
    shown = nodes if len(nodes) <= MOST_NODES else nodes[: MOST_NODES - 1]
    spent: dict[int | None, list[int]] = defaultdict(lambda: [0] * (len(at) - 1))
    for entry in found.entries:
        spent[entry.node_id if entry.node_id in shown else None][entry.period] += entry.units
    series = []
    for amounts in (spent[key] for key in [*shown, *([None] if None in spent else [])]):
        sums = [0]
        for amount in amounts:
            sums.append(sums[-1] + amount)
        series.append([usd(value) for value in sums])
    names = [f"node {node}" for node in shown] + [f"{len(nodes) - len(shown)} other nodes"] * (None in spent)
    axis.stackplot(at, series, labels=names, colors=COLOURS, alpha=0.8)

"""Charts of a bill: what it bought, and when each node spent it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from dtrain_dagster.costs.ledger import Ledger
from dtrain_dagster.costs.money import HOUR, SECOND, usd
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.reports.drawing import COLOURS, INK, MUTED, label, new_figure, svg
from dtrain_dagster.support.formatting import dollars, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    CostCause.STARTUP: "#8c959f",
    CostCause.LOST: "#24292f",
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
        ((size, name) for size, name in ((HOUR, "hours"), (60 * SECOND, "minutes")) if length > 3 * size),
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

"""Charts of where time goes: in a step, on the network, and on the nodes over the whole job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.monitoring.windows import COMMUNICATION_LIMIT, COMMUNICATION_SEGMENTS, SEGMENTS, shares_by_window
from dtrain_dagster.reports.drawing import COLOURS, GRID, INK, MUTED, label, line, new_figure, svg
from dtrain_dagster.reports.performance import Communication, RankPerformance
from trainer.documents.events import MembershipEvent, StepEvent, TimingEvent, read_events

SEGMENT_COLOURS = {
    "input": "#9a6700",
    "forward": "#54aeff",
    "backward": "#0969da",
    "communication": "#cf222e",
    "waiting": "#ffaba8",
    "optimizer": "#1a7f37",
    "checkpoint": "#8250df",
    "other": "#afb8c1",
}
MOST_RANKS = 24
"""The most bars that can be told apart."""
SMALLEST_RATED = 10_000
"""The least bytes of a collective for which a bandwidth is meaningful."""


def step_chart(ranks: Sequence[RankPerformance]) -> bytes:
    """Return an SVG with a bar per rank: the milliseconds of a step by segment."""
    shown = ranks[:MOST_RANKS]
    figure = new_figure(9, 1.5 + 0.36 * len(shown))
    axis = figure.subplots()
    names = [f"rank {item.rank} (node {item.node_id})" for item in shown]
    total = max(sum(item.milliseconds.values()) for item in shown)
    left = [0.0] * len(shown)
    for segment in SEGMENTS:
        values = [item.milliseconds.get(segment, 0.0) for item in shown]
        if max(values) < 0.002 * total:
            continue
        axis.barh(names, values, left=left, color=SEGMENT_COLOURS[segment], label=segment, height=0.66)
        for row, value in enumerate(values):
            if value > 0.06 * total:
                dark = segment in ("waiting", "other", "forward")
                axis.text(
                    left[row] + value / 2, row, f"{value:.3g}", ha="center", va="center", fontsize=8,
                    color=INK if dark else "white",
                )  # fmt: skip
        left = [start + value for start, value in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.set_xlim(0, total * 1.01)
    more = f", the first {len(shown)} of {len(ranks)} ranks" if len(shown) < len(ranks) else ""
    label(axis, f"A step of each rank{more}", "milliseconds per step", "")
    axis.grid(visible=False, axis="y")
    figure.legend(frameon=False, fontsize=8, ncols=8, loc="outside lower center")
    return svg(figure)


def communication_chart(windows: Sequence[TimingEvent], communication: Communication) -> bytes:
    """Return an SVG of network time and waiting as shares of the step over the job, and below it of each collective
    with its hidden share."""
    collectives = communication.collectives[:MOST_RANKS]
    figure = new_figure(9, 3.3 + 0.9 + 0.26 * len(collectives))
    upper, lower = figure.subplots(2, 1, height_ratios=(3.3, 0.9 + 0.26 * len(collectives)))
    for segment, name in (("communication", "network"), ("waiting", "waiting for slower ranks")):
        points = [(window.step, 100 * window.mean(segment) / window.seconds) for window in windows]
        line(upper, points, name, SEGMENT_COLOURS[segment], width=1.4)
    both = zip(windows, shares_by_window(windows, COMMUNICATION_SEGMENTS), strict=True)
    line(upper, [(window.step, 100 * share) for window, share in both], "both", MUTED, width=1.0)
    limit = 100 * COMMUNICATION_LIMIT
    upper.axhline(limit, color=INK, linewidth=1, linestyle="--", label=f"limit for both, {limit:.0f} %")
    upper.set_ylim(0, 1.25 * max(limit, upper.dataLim.ymax))  # room for the legend
    label(upper, "Communication that nothing hides", "optimizer step", "% of the step")
    upper.legend(frameon=False, fontsize=8, ncols=4, loc="upper right")
    names = [f"{item.name} ({_size(item.bytes)})" for item in collectives]
    network = [1000 * item.wire_seconds for item in collectives]
    waits = [1000 * sum(item.waiting_seconds) / max(1, len(item.waiting_seconds)) for item in collectives]
    longest = max((a + b for a, b in zip(network, waits, strict=True)), default=1.0) or 1.0
    lower.barh(names, network, color=SEGMENT_COLOURS["communication"], label="network", height=0.62)
    lower.barh(
        names, waits, left=network, color=SEGMENT_COLOURS["waiting"], label="waiting, mean over ranks", height=0.62
    )
    for row, item in enumerate(collectives):
        is_large = item.bytes >= SMALLEST_RATED
        rate = f", {(item.bandwidth_bytes_per_second or 0.0) / 1e6:,.0f} MB/s" if is_large else ""
        text = f" {item.overlap:.0%} hidden by the backward pass{rate}"
        lower.text(network[row] + waits[row], row, text, va="center", fontsize=8, color=MUTED)
    lower.invert_yaxis()
    lower.set_xlim(0, longest * 1.75)
    label(lower, "Each collective of a step", "milliseconds, median over windows", "")
    lower.grid(visible=False, axis="y")
    return svg(figure)


def timeline_chart(usage: Sequence[NodeUsage], events: Iterable[Mapping[str, Any]]) -> bytes:
    """Return an SVG with a row per node: the time that was paid for, and the generations in which it trained; below,
    events."""
    events = list(events)
    nodes = sorted({interval.node_id for interval in usage})
    start, end = min(interval.started_at for interval in usage), max(interval.ended_at for interval in usage)
    unit, seconds = ("minutes", 60.0) if end - start > 600 else ("seconds", 1.0)

    def at(time: float) -> float:
        return (time - start) / seconds

    figure = new_figure(9, 1.9 + 0.34 * (len(nodes) + 1))
    axis = figure.subplots()
    row = {node: place for place, node in enumerate(nodes)}
    for place, interval in enumerate(usage):
        axis.barh(
            row[interval.node_id], at(interval.ended_at) - at(interval.started_at), left=at(interval.started_at),
            color=GRID, height=0.7, label=None if place else "paid for",
        )  # fmt: skip
    changes = read_events(MembershipEvent, events)
    told: set[str] = set()
    for number, item in enumerate(changes):
        until = changes[number + 1].time if number + 1 < len(changes) else _trained_until(events, end)
        name = "trains, in parameter-server mode" if item.has_parameter_server else "trains"
        colour = COLOURS[3] if item.has_parameter_server else COLOURS[0]
        for node in dict.fromkeys(item.nodes):
            if node in row:
                length = max(0.0, at(until) - at(item.time))
                text = None if name in told else name
                axis.barh(row[node], length, left=at(item.time), color=colour, height=0.42, label=text)
                told.add(name)
        if number:
            axis.axvline(at(item.time), color=INK, linewidth=0.8, linestyle=":")
            lost, joined = (", ".join(map(str, nodes)) for nodes in (item.lost, item.joined))
            words = "  ".join(part for part in (f"−{lost}" if lost else "", f"+{joined}" if joined else "") if part)
            axis.annotate(
                f"gen. {item.generation} {words}", (at(item.time), -0.62), fontsize=7.5, color=INK,
                xytext=(2, 0), textcoords="offset points", annotation_clip=False,
            )  # fmt: skip
    below = len(nodes)
    marks = (
        ("evaluation", "o", COLOURS[1], "evaluation"),
        ("checkpoint", "s", COLOURS[3], "checkpoint saved"),
        ("communication_error", "X", COLOURS[4], "communication failed"),
        ("out_of_memory", "P", COLOURS[5], "out of memory"),
        ("hang", "D", COLOURS[4], "hang"),
    )
    for kind, marker, colour, name in marks:
        times = [at(item["time"]) for item in events if item["kind"] == kind]
        if times:
            axis.plot(times, [below] * len(times), marker, color=colour, markersize=5, label=name, linestyle="none")
    axis.set_yticks([*range(len(nodes)), below], [*(f"node {node}" for node in nodes), "events"])
    axis.set_ylim(below + 0.6, -0.9)
    axis.set_xlim(0, at(end) or 1.0)
    label(axis, "", f"{unit} since the first node", "")
    axis.set_title("Nodes and what happened", fontsize=10, color=INK, loc="left", fontweight="bold", pad=12)
    axis.grid(visible=False, axis="y")
    figure.legend(frameon=False, fontsize=8, ncols=6, loc="outside lower center")
    return svg(figure)


def _trained_until(events: Sequence[Mapping[str, Any]], end: float) -> float:
    """Return the last step's time: after it the job evaluates and writes, and does not train."""
    return max((item.time for item in read_events(StepEvent, events)), default=end)


def _size(count: int) -> str:
    if count >= 1_000_000:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1000:.1f} kB" if count >= 1000 else f"{count} B"

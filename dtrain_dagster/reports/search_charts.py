"""The charts of a search: its history, its score against dollars, parallel coordinates, and what mattered. SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtrain_dagster.reports.drawing import COLOURS, GRID, INK, MUTED, label, line, new_figure, svg
from dtrain_dagster.search.results import improvements
from dtrain_dagster.search.space import Choices, Parameter, Space
from dtrain_dagster.search.trials import Trial, TrialState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATE_COLOURS = {
    TrialState.COMPLETE: COLOURS[0], TrialState.PRUNED: COLOURS[1], TrialState.FAILED: COLOURS[4],
    TrialState.RUNNING: COLOURS[7],
}  # fmt: skip
STATE_WORDS = {
    TrialState.COMPLETE: "trained to its end", TrialState.PRUNED: "ended early", TrialState.FAILED: "failed",
    TrialState.RUNNING: "running",
}  # fmt: skip
MOST_SPREAD = 6.0
"""Scores further from the best than this many times what the middle one is are drawn at the edge."""


def history_chart(trials: Sequence[Trial], sign: float, metric: str) -> bytes:
    """Return an SVG of the best score of each trial, in order, and of the best so far."""
    figure = new_figure(9, 3.4)
    axis = figure.subplots()
    scored = [(trial, score) for trial in trials if (score := trial.best(sign)) is not None]
    for state, colour in STATE_COLOURS.items():
        points = [(trial.number, score) for trial, score in scored if trial.state is state]
        if points:
            numbers, scores = zip(*points, strict=True)
            axis.scatter(numbers, scores, color=colour, s=26, zorder=3, label=STATE_WORDS[state])
    best, steps = None, []
    for trial, score in scored:
        best = score if best is None or sign * score < sign * best else best
        steps.append((trial.number, best))
    if steps:
        axis.step(*zip(*steps, strict=True), where="post", color=INK, linewidth=1.2, label="best so far")
    _limit(axis, [score for _, score in scored], sign)
    axis.locator_params(axis="x", integer=True)
    label(axis, f"Best {metric} of each trial", "trial", metric)
    _legend(axis)
    return svg(figure)


def dollars_chart(trials: Sequence[Trial], sign: float, metric: str) -> bytes:
    """Return an SVG of the best score so far against the dollars of all trials until then, with the price of each
    improvement."""
    figure = new_figure(9, 3.4)
    axis = figure.subplots()
    found = improvements(trials, sign)
    total = sum(trial.usd for trial in trials)
    if found:
        points = [(item.usd, item.score) for item in found] + [(total, found[-1].score)]
        axis.step(*zip(*points, strict=True), where="post", color=COLOURS[0], linewidth=1.6)
        axis.scatter([item.usd for item in found], [item.score for item in found], color=COLOURS[0], s=24, zorder=3)
        _limit(axis, [item.score for item in found], sign)
        for item in _apart(found[1:], total):
            axis.annotate(
                f"trial {item.trial}: ${item.usd_since:.2g}", (item.usd, item.score), textcoords="offset points",
                xytext=(4, 6 if sign > 0 else -11), fontsize=7, color=MUTED,
            )  # fmt: skip
    axis.set_xlim(left=0)
    axis.margins(x=0.08)
    label(axis, f"Best {metric} against dollars, with what each improvement cost", "dollars of all trials", metric)
    return svg(figure)


def _apart(found: Sequence[Any], total: float) -> list[Any]:
    """Return those improvements whose words have room beside each other, the last one included."""
    shown: list[Any] = []
    for item in reversed(found):
        if not shown or shown[-1].usd - item.usd > 0.1 * total:
            shown.append(item)
    return shown


def curves_chart(trials: Sequence[Trial], sign: float, metric: str) -> bytes:
    """Return an SVG of the learning curves, each to where it was ended."""
    figure = new_figure(9, 3.4)
    axis = figure.subplots()
    told = set[TrialState]()
    for trial in sorted(trials, key=lambda item: item.state is TrialState.COMPLETE):
        points = [(place / trial.of, score) for place, score in enumerate(trial.scores, 1) if math.isfinite(score)]
        if not points:
            continue
        text = "" if trial.state in told else STATE_WORDS[trial.state]
        told.add(trial.state)
        line(axis, points, text or "_nolegend_", STATE_COLOURS[trial.state], marker="o", width=1.0)
    _limit(axis, [score for trial in trials for score in trial.scores if math.isfinite(score)], sign)
    label(axis, f"{metric} as the trials went", "share of the training", metric)
    _legend(axis)
    return svg(figure)


def coordinates_chart(space: Space, trials: Sequence[Trial], sign: float, metric: str) -> bytes:
    """Return an SVG of parallel coordinates: a line for each trial through its values, the better the darker."""
    scored = sorted(
        ((score, trial) for trial in trials if (score := trial.best(sign)) is not None),
        key=lambda item: -sign * item[0],
    )
    shown = list(space.parameters)
    figure = new_figure(max(7.0, 1.7 * (len(shown) + 1)), 4.0)
    axis = figure.subplots()
    for place, (_, trial) in enumerate(scored):
        share = (place + 1) / len(scored)
        heights = [_height(item, trial.values.get(item.name)) for item in shown] + [share]
        points = [(at, height) for at, height in enumerate(heights) if height is not None]
        is_best = place == len(scored) - 1
        colour, alpha = (COLOURS[1], 1.0) if is_best else (COLOURS[0], 0.1 + 0.5 * share**2)
        places, lengths = zip(*points, strict=True)
        axis.plot(places, lengths, color=colour, alpha=alpha, linewidth=2.2 if is_best else 1.0, zorder=2 + is_best)
    for at, item in enumerate(shown):
        axis.axvline(at, color=GRID, linewidth=1)
        for height, text in _ticks(item):
            axis.annotate(
                text, (at, height), fontsize=7, color=INK, textcoords="offset points", xytext=(3, 0), va="center"
            )
    axis.axvline(len(shown), color=GRID, linewidth=1)
    if scored:
        for height, score in ((1.0, scored[-1][0]), (1 / len(scored), scored[0][0])):
            axis.annotate(
                f"{score:.4g}", (len(shown), height), fontsize=7, color=INK, textcoords="offset points", xytext=(3, 0),
                va="center",
            )  # fmt: skip
    label(axis, f"Values of each trial; the best by {metric} in orange, on the right by rank", "", "")
    axis.set_xticks(range(len(shown) + 1), [*(item.short_name for item in shown), f"{metric} (rank)"])
    axis.tick_params(axis="x", labelsize=8)
    axis.set_yticks([])
    axis.grid(visible=False)
    axis.set_xlim(-0.1, len(shown) + 0.5)
    axis.spines["left"].set_visible(False)
    return svg(figure)


def importance_chart(shares: Mapping[str, float], metric: str) -> bytes:
    """Return an SVG of what made scores differ, by parameter."""
    figure = new_figure(9, 0.9 + 0.34 * max(1, len(shares)))
    axis = figure.subplots()
    ordered = sorted(shares.items(), key=lambda item: item[1])
    axis.barh([name for name, _ in ordered], [100 * share for _, share in ordered], color=COLOURS[0], height=0.6)
    label(axis, f"What made {metric} differ between trials (PED-ANOVA)", "% of all parameters", "")
    axis.grid(visible=False, axis="y")
    return svg(figure)


def _height(parameter: Parameter, value: Any) -> float | None:
    """Return where a value lies on its axis, from 0 to 1; None where it is not there."""
    domain = parameter.domain
    if value is None and not (isinstance(domain, Choices) and None in domain.values):
        return None
    if isinstance(domain, Choices):
        return (domain.values.index(value) + 0.5) / len(domain.values)
    if domain.high == domain.low:
        return 0.5
    if domain.log:
        return math.log(value / domain.low) / math.log(domain.high / domain.low)
    return (value - domain.low) / (domain.high - domain.low)


def _ticks(parameter: Parameter) -> list[tuple[float, str]]:
    domain = parameter.domain
    if isinstance(domain, Choices):
        return [((place + 0.5) / len(domain.values), str(value)[:14]) for place, value in enumerate(domain.values)]
    return [(0.0, f"{domain.low:.4g}"), (1.0, f"{domain.high:.4g}")]


def _limit(axis: Axes, scores: Sequence[float], sign: float) -> None:
    """Keep scores that are far off, such as those of a diverged trial, from pressing all others into a line."""
    if len(scores) < 4:
        return
    best = sign * min(sign * score for score in scores)
    middle = sorted(abs(score - best) for score in scores)[len(scores) // 2]
    worst = max(abs(score - best) for score in scores)
    if middle > 0 and worst > MOST_SPREAD * middle:
        edge, room = best + sign * MOST_SPREAD * middle, 0.2 * sign * middle
        low, high = sorted((best - room, edge))
        axis.set_ylim(low, high)


def _legend(axis: Axes) -> None:
    """Show the legend above the chart, where no point is."""
    if handles := axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, ncols=len(handles), loc="lower right", bbox_to_anchor=(1.0, 1.0))

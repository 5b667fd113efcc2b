"""The charts of a search: its score against dollars, its learning curves, and Optuna's own. SVG."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtrain_dagster.reports.drawing import COLOURS, INK, MUTED, label, line, new_figure, svg
from dtrain_dagster.search.results import improvements, scored_study
from dtrain_dagster.search.space import Space
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
LEAST_SCORED = 2
"""Trials with a score from which Optuna draws something."""


def optuna_charts(
    space: Space, trials: Sequence[Trial], sign: float, metric: str, has_importance: bool = False
) -> dict[str, bytes]:
    """Return Optuna's charts as SVG, by their titles: of the best score of each trial, and of the parameters that every
    trial has. Empty where too few trials have a score. ``has_importance``: whether `importances` found something."""
    study = scored_study(space, trials, sign)
    if len(study.trials) < LEAST_SCORED:
        return {}
    import matplotlib as mpl
    import optuna

    mpl.use("Agg")  # no display
    from matplotlib import pyplot

    plots = optuna.visualization.matplotlib
    drawn = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are experimental
        drawn["History"] = plots.plot_optimization_history(study, target_name=metric)
        if study.trials[0].params:
            drawn["Parallel coordinates"] = plots.plot_parallel_coordinate(study, target_name=metric)
        if has_importance:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            drawn["Importance"] = plots.plot_param_importances(study, evaluator, target_name=metric)
    found = {}
    for title, axes in drawn.items():
        buffer, figure = io.BytesIO(), axes.get_figure(root=True)
        assert figure is not None
        axes.set_title(title, fontsize=10, color=INK, loc="left", fontweight="bold")
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
        found[title] = buffer.getvalue()
    return found


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

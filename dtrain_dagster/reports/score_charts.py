"""The chart of the quality of past estimates: SVG, with axes, units and a legend."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain_dagster.planning.scoring import Score, summarise_scores
from dtrain_dagster.reports.drawing import COLOURS, MUTED, label, new_figure, svg

INSIDE, OUTSIDE = COLOURS[0], COLOURS[4]
ROLLING = 10
"""The number of runs that a point of the lower chart covers."""


def history_chart(scores: Sequence[Score]) -> bytes:
    """Return an SVG of each run's cost, as a share of its estimate, over the 90 % interval it was given, and below it
    of the median error of the latest runs. The oldest run comes first."""
    figure = new_figure(9, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    numbers = range(1, len(scores) + 1)
    shares = [
        tuple(100 * value / score.usd.expected for value in (score.usd.low, score.actual_usd, score.usd.high))
        for score in scores
    ]
    for number, (low, _, high) in zip(numbers, shares, strict=True):
        upper.plot([number, number], [low, high], color="#afb8c1", linewidth=5, solid_capstyle="butt", zorder=1)
    upper.plot([], [], color="#afb8c1", linewidth=5, label="90 % interval")
    for is_within, colour, text in ((True, INSIDE, "within"), (False, OUTSIDE, "outside")):
        chosen = [
            (number, actual)
            for number, (_, actual, _), score in zip(numbers, shares, scores, strict=True)
            if score.is_within is is_within
        ]
        if chosen:
            upper.scatter(*zip(*chosen, strict=True), color=colour, s=30, zorder=3, label=text)
    upper.axhline(100, color=MUTED, linewidth=1, linestyle="--", label="as estimated")
    label(upper, "Cost of each finished run against its estimate", "", "% of the estimate")
    errors = [
        100 * (summarise_scores(scores[max(0, number - ROLLING) : number]).median_error or 0.0) for number in numbers
    ]
    lower.plot(numbers, errors, "o-", color=COLOURS[1], markersize=3, linewidth=1.3)
    lower.set_ylim(bottom=0)
    lower.set_xlim(0.5, max(5, len(scores)) + 0.5)
    lower.xaxis.get_major_locator().set_params(integer=True)
    label(lower, f"Median error of the last {ROLLING} runs", "finished run", "%")
    figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside upper right")
    return svg(figure)

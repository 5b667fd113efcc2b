"""Curves and shares as a few lines of letters, which Dagster's UI shows where they stand, on a light or a dark page.

It shows Markdown of less than 1000 characters in place, and a link to anything longer. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dtrain_dagster.support.formatting import in_markdown

SHOWN_IN_PLACE = 1000
"""Dagster's UI shows Markdown in place where it has fewer characters."""
WIDTH = 24
"""The letters of a curve, or of all shares together: what a column of 260 pixels has room for."""
MOST_LINES = 5
HEIGHTS = "▁▂▃▄▅▆▇█"
LONGEST_NAME = 60

Points = Sequence[tuple[float, float]]


def small_curves(curves: Mapping[str, Points]) -> str:
    """Return Markdown with a line for each curve, each of a scale of its own, with its first and its last value; ""
    where no curve has two points."""
    finite = {
        name: [value for at, value in points if math.isfinite(at) and math.isfinite(value)]
        for name, points in curves.items()
    }
    drawn = {name: values for name, values in finite.items() if len(values) > 1}
    lines = []
    for name, values in list(drawn.items())[:MOST_LINES]:
        low = min(values)
        height = max(values) - low or 1.0
        places = ((value - low) / height for value in _merged(values))
        letters = "".join(HEIGHTS[round(place * (len(HEIGHTS) - 1))] for place in places)
        lines.append(f"- `{letters}` {in_markdown(name, LONGEST_NAME)} {values[0]:.4g} → {values[-1]:.4g}")
    return "\n".join(lines)


def small_bar(parts: Mapping[str, float]) -> str:
    """Return Markdown with a line for each part, the largest first, and one for the rest; "" where they are nothing."""
    whole = sum(parts.values())
    if not whole > 0:
        return ""
    order = sorted(parts, key=lambda name: -parts[name])
    shown = {in_markdown(name, LONGEST_NAME): parts[name] for name in order[: MOST_LINES - 1]}
    if rest := sum(parts[name] for name in order[MOST_LINES - 1 :]):
        shown["other"] = rest
    lines = [(math.ceil(WIDTH * value / whole) * "█", name, value / whole) for name, value in shown.items() if value]
    return "\n".join(f"- `{bar}` {name} {share:.0%}" for bar, name, share in lines)


def _merged(values: Sequence[float]) -> list[float]:
    """Return at most `WIDTH` values: the means of neighbours, and the last one as it is."""
    size = math.ceil(len(values) / WIDTH)
    groups = [values[first : first + size] for first in range(0, len(values), size)]
    return [*(math.fsum(group) / len(group) for group in groups[:-1]), values[-1]]

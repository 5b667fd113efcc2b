"""Pictures of a few hundred characters, which Dagster's UI shows where they stand.

It shows Markdown of less than 1000 characters in place, and a link to anything longer. Colours and letters are of
middle brightness, since a page is light or dark and a picture does not learn which. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from urllib.parse import quote

SHOWN_IN_PLACE = 1000
"""Dagster's UI shows Markdown in place where it has fewer characters."""
WIDTH, HEIGHT = 260, 84
FOOT = 12
"""The height of a line of text below."""
LETTERS = 46
"""The letters of a line."""
COLOURS = ("#4c8dff", "#e8793a", "#2fa55d", "#a475f9", "#e5534b", "#b08800", "#8b949e")
INK = "#8b949e"
_SAFE = "/:,=';"
"""Letters that need no escape in an address within Markdown."""
MOST_POINTS = 44
"""The most points of all curves together; beyond that, neighbours are merged into their means."""

Points = Sequence[tuple[float, float]]


def small_curves(curves: Mapping[str, Points]) -> str:
    """Return Markdown with lines on common axes, each with its last value, and up to two of them also with their first;
    "" where no curve has two points."""
    finite = {name: _finite(points) for name, points in curves.items()}
    # Long names and figures leave less room for points.
    pictures = (_curves(finite, most // max(2, len(curves))) for most in (MOST_POINTS, MOST_POINTS // 2))
    return next(filter(None, pictures), "")


def _curves(curves: Mapping[str, Points], most: int) -> str:
    """Return `small_curves` with at most this many points of each curve."""
    drawn = {name: _merged(points, most) for name, points in curves.items()}
    drawn = {name: points for name, points in drawn.items() if len(points) > 1}
    if not drawn:
        return ""
    left = min(points[0][0] for points in drawn.values())
    right = max(points[-1][0] for points in drawn.values())
    everything = [value for points in drawn.values() for _, value in points]
    low, high = min(everything), max(everything)
    parts: list[str] = []
    words: list[tuple[str, str]] = []
    for (name, points), colour in zip(drawn.items(), COLOURS, strict=False):
        places = [
            (
                round(WIDTH * (at - left) / ((right - left) or 1.0)),
                round(2 + (HEIGHT - FOOT - 8) * (high - value) / ((high - low) or 1.0)),
            )
            for at, value in points
        ]
        line = ",".join(f"{x},{y}" for x, y in places)
        parts.append(f"<polyline points='{line}' stroke='{colour}' fill='none'/>")
        first = f"{points[0][1]:.4g} → " if len(drawn) < 3 else ""  # of more there is no room for it
        words.append((f"{name} {first}{points[-1][1]:.4g}", colour))
    return _markdown(parts, words, ", ".join(text for text, _ in words))


def small_bar(parts: Mapping[str, float]) -> str:
    """Return Markdown with one bar that is divided in these parts, the largest named with their shares; "" where they
    are nothing."""
    # Long names leave less room for parts.
    pictures = (_bar(parts, most) for most in range(len(COLOURS) - 1, 0, -1))
    return next(filter(None, pictures), "")


def _bar(parts: Mapping[str, float], most: int) -> str:
    """Return `small_bar` with at most this many parts of their own."""
    whole = sum(parts.values())
    if not whole > 0:
        return ""
    order = sorted(parts, key=lambda name: -parts[name])[:most]
    rest = whole - sum(parts[name] for name in order)
    shown = {name: parts[name] for name in order} | ({"other": rest} if rest > 0.005 * whole else {})
    drawn: list[str] = []
    words: list[tuple[str, str]] = []
    at = 0.0
    for (name, value), colour in zip(shown.items(), COLOURS, strict=False):
        width = WIDTH * value / whole
        drawn.append(f"<path d='M{at:.0f},14h{width:.0f}' stroke='{colour}' stroke-width='26'/>")
        at += width
        if len(words) < 3:
            words.append((f"{name} {value / whole:.0%}", colour))
    return _markdown(drawn, words, ", ".join(f"{name} {value / whole:.0%}" for name, value in shown.items()), 44)


def _markdown(parts: Sequence[str], words: Sequence[tuple[str, str]], title: str, height: int = HEIGHT) -> str:
    """Return the picture with words below, in lines as they fit, in Markdown; "" where it would not be shown in
    place."""
    lines, spans = 0, ""
    room = 0
    for text, colour in words:
        room -= len(text) + 1
        if is_new := room < 0:
            lines, room = lines + 1, LETTERS - len(text) - 1
        place = f"x='0' y='{height - 3 + FOOT * (lines - 1)}'" if is_new else "dx='6'"
        spans += f"<tspan fill='{colour}' {place}>{_text(text)}</tspan>"
    height += FOOT * (lines - 1)
    text = f"<text font-size='11' font-family='sans-serif'>{spans}</text>"
    body = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}'>{''.join(parts)}{text}</svg>"
    markdown = f"![{_text(title)}](data:image/svg+xml,{quote(body, safe=_SAFE)})"
    return markdown if len(markdown) < SHOWN_IN_PLACE else ""


def _text(text: str) -> str:
    return "".join(" " if letter in "<>&()[]\"'`\\" else letter for letter in text)


def _finite(points: Points) -> Points:
    return [(at, value) for at, value in points if math.isfinite(at) and math.isfinite(value)]


def _merged(points: Points, most: int) -> Points:
    """Return at most this many points, and the last one as it is."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    groups = [points[first : first + size] for first in range(0, len(points) - 1, size)]
    merged = [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]
    return [*merged[:-1], points[-1]]

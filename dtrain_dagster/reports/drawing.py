"""The common look of every chart: colours, labels, grid, and the conversion to SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#24292f", "#6e7781", "#d8dee4"
COLOURS = ("#0969da", "#bf5700", "#1a7f37", "#8250df", "#cf222e", "#9a6700", "#0e7490", "#57606a")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    # Figure, not pyplot: no global state and no display, so any thread of any process may draw.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def line(
    axis: Axes,
    points: Sequence[tuple[float, float]],
    text: str,
    colour: str,
    marker: str | None = None,
    width: float = 1.5,
) -> None:
    """Draw a labelled line through ``points`` (x, y)."""
    horizontal, vertical = ([point[index] for point in points] for index in (0, 1))
    axis.plot(horizontal, vertical, label=text, color=colour, linewidth=width, marker=marker, markersize=4)


def label(axis: Axes, title: str, horizontal: str, vertical: str) -> None:
    """Set an axis's title and labels, in the common style."""
    axis.set_title(title, fontsize=10, color=INK, loc="left", fontweight="bold")
    axis.set_xlabel(horizontal, fontsize=9, color=MUTED)
    axis.set_ylabel(vertical, fontsize=9, color=MUTED)
    axis.tick_params(labelsize=8, colors=MUTED)
    axis.grid(visible=True, color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GRID)
    if axis.get_legend_handles_labels()[0] and axis.get_legend() is None and title.startswith("Loss"):
        axis.legend(frameon=False, fontsize=8)


def svg(figure: Figure) -> bytes:
    """Return the figure as SVG."""
    buffer = io.BytesIO()
    # No date in the file: the same figures give the same bytes.
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()

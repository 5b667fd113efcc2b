"""What `dtrain` prints to a terminal: text whose control characters are visible, and tables that fit into it. What
matters least is left out of them and named, and nothing is cut off within."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trainer.printable import visible


class Screen(Console):
    """A console that takes text literally: no markup, no emoji codes, no control characters. The only colours are those
    of this project."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text, made visible before it is measured, so that columns stay columns."""
        return super().render_str(visible(text, keep_lines=True), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield segments with visible text, also of text that was styled elsewhere."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text, keep_lines=True), segment.style)


Cell = str | Text
COLOURS = {"running": "cyan", "succeeded": "green", "failed": "red", "damaged": "red"}
"""State of a job → its colour; others are yellow: it waits, or somebody ended it."""
_GAP = 2
"""Blanks between two columns."""


def plain_table(*titles: str, right: Collection[str] = (), no_wrap: bool = False) -> Table:
    """Return a table with these columns, those of ``right`` aligned to the right, and no rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", no_wrap=no_wrap, overflow="fold")
    return table


def fitted_table(
    titles: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, right: Collection[str] = (), always: int = 2
) -> tuple[Table, list[str]]:
    """Return a table that fits into ``width``, and the titles of the last columns, which are left out where the room is
    short; the first of them are there ``always``. Where even these do not fit, cells go over several lines. Pure."""
    cells = [[visible(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(titles, *cells, strict=True)]
    shown = len(titles)
    while (fits := sum(widths[:shown]) + _GAP * (shown - 1) <= width) is False and shown > always:
        shown -= 1
    table = plain_table(*titles[:shown], right=right, no_wrap=fits)
    for row in cells:
        table.add_row(*row[:shown])
    return table, [title.replace("\n", " ") for title in titles[shown:]]


def words_of_left_out(titles: Sequence[str], width: int) -> str:
    """Return what is said below a table that leaves these columns out. Pure."""
    return f"{width} columns leave out {', '.join(titles)} (--json has all)"


def print_fitted(
    console: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    right: Collection[str] = (),
    always: int = 2,
) -> None:
    """Print a table as wide as the console, and say below what is left out of it."""
    table, left_out = fitted_table(titles, rows, console.width, right, always)
    console.print(table, highlight=False)
    if left_out:
        console.print(words_of_left_out(left_out, console.width), style="dim", highlight=False)


def _width(cell: Cell) -> int:
    text = cell.plain if isinstance(cell, Text) else cell
    return max(map(cell_len, text.splitlines()), default=0)


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return (name, figure) pairs in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for what, figure in pairs:
        table.add_row(what, figure)
    return table


def name_some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names of a list, and how many more there are. Pure."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


def state_text(state: str) -> Text:
    """Return the state of a job in its colour."""
    return Text(state, style=COLOURS.get(state, "yellow"))

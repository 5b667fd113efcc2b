"""What `dtrain` prints to a terminal: text whose control characters are visible, and tables that fit into it. What
matters least is left out of them and named, and nothing is cut off within."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    """A newline in it makes two lines, for a narrower column."""
    right: bool = False
    rank: int = 0
    """0: always there; of the others, those of the highest rank are left out first where the room is short."""


def fitted_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> tuple[Table, list[str]]:
    """Return a table that fits into ``width``, and the titles of the columns that are left out. Where even the others
    do not fit, cells go over several lines. Pure."""
    shown = [[visible(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [
        max([_width(column.title), *(_width(row[number]) for row in shown)]) for number, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    for number in sorted(kept, key=lambda number: columns[number].rank, reverse=True):
        if columns[number].rank == 0 or sum(widths[one] for one in kept) + _GAP * (len(kept) - 1) <= width:
            break
        kept.remove(number)
    fits = sum(widths[one] for one in kept) + _GAP * (len(kept) - 1) <= width
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in kept:
        column = columns[number]
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=fits, overflow="fold")
    for row in shown:
        table.add_row(*(row[number] for number in kept))
    return table, [column.title.replace("\n", " ") for number, column in enumerate(columns) if number not in kept]


def print_fitted(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table as wide as the console, and say below what is left out of it."""
    table, left_out = fitted_table(columns, rows, console.width)
    console.print(table, highlight=False)
    if left_out:
        text = f"{console.width} columns leave out {', '.join(left_out)} (--json has all)"
        console.print(text, style="dim", highlight=False)


def plain_table(*titles: str, right: Sequence[str] = ()) -> Table:
    """Return a table with these columns, those of ``right`` aligned to the right, and no rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left")
    return table


def _width(cell: Cell) -> int:
    text = cell.plain if isinstance(cell, Text) else cell
    return max(map(cell_len, text.splitlines()), default=0)


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return (name, figure) pairs in two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for what, figure in pairs:
        table.add_row(what, figure)
    return table


def state_text(state: str) -> Text:
    """Return the state of a job in its colour."""
    return Text(state, style=COLOURS.get(state, "yellow"))

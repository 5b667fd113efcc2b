"""A bar of a terminal with a line below it, which may take several lines, so that nothing of it is cut off."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn
from rich.text import Text

from dtrain_dagster.cli.terminal import wrap_parts
from trainer.printable import visible


class BarAndLine:
    """A bar that is updated in place and is gone at the end; where there is no terminal, nothing is shown."""

    def __init__(self, console: Console, is_shown: bool = True) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(finished_text=" "), BarColumn(bar_width=40), TaskProgressColumn(), console=console
        )
        self._task = self._bar.add_task("", total=None)
        shown = is_shown and console.is_terminal
        self._live = Live(self._bar, console=console, transient=True, refresh_per_second=4) if shown else None

    def __enter__(self) -> BarAndLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, text: str, completed: float, total: float | None) -> None:
        """Show this much of the total, and a line whose parts are separated as in a line of progress."""
        if self._live is not None:
            self._bar.update(self._task, completed=completed, total=total)
            line = Text("\n".join(wrap_parts(visible(text), self._console.width)))
            self._live.update(Group(self._bar, line))

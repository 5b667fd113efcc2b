"""The terminal that `dtrain` prints tables and progress to. Control characters from nodes and storage are made
visible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
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

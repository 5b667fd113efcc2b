"""One line of progress for whoever waits in front of a script: epoch, step, loss, validation, speed and time left.

It is made from the events of rank 0, as they are reported. What `dtrain watch` shows of a cluster's job belongs to
`dtrain_dagster.cli`.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from typing import Any, TextIO


class ProgressLine:
    """A line of a terminal that is written anew with each report, by one process."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """``stream``: where the line goes; None: standard error."""
        self._stream = stream or sys.stderr
        self._step: Mapping[str, Any] | None = None
        self._valid: float | None = None
        self._width = 0

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show what an event tells of the progress; events of other kinds change nothing."""
        if kind == "evaluation":
            self._valid = fields["loss"]
        elif kind == "step":
            self._step = fields
        else:
            return
        if self._step is not None:
            self._write(format_progress_line(self._step, self._valid))

    def close(self) -> None:
        """End the line, if there is one."""
        if self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def _write(self, text: str) -> None:
        text = text[: shutil.get_terminal_size((120, 24)).columns - 1]
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)


def format_progress_line(step: Mapping[str, Any], valid: float | None) -> str:
    """Return the line for a ``step`` event and the latest loss of validation, if there is one. Pure."""
    left, seconds = step["eta_seconds"], step["step_seconds"]
    total = step["step"] + (round(left / seconds) if seconds else 0)
    parts = [
        f"epoch {step['epoch'] + 1}",
        f"step {step['step']}/{total}",
        f"loss {step['loss']:.4g}",
        *([] if valid is None else [f"valid {valid:.4g}"]),
        f"{step['samples_per_second']:,.0f} samples/s",
        f"{format_seconds(left)} left",
    ]
    return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, without those that lead with zero. Pure."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

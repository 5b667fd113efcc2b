"""One line of progress for whoever waits in front of a script: epoch, step, loss, validation, speed and time left.

It is made from the events of rank 0, as they are reported, in the words of `dtrain status --follow`, which shows a
cluster's job (`dtrain_dagster.planning.projection`).
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from trainer.printable import format_duration


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class ProgressLine:
    """A line of a terminal or a notebook that is written anew with each report, by one process."""

    def __init__(self) -> None:
        self._stream = sys.stdout if is_notebook() else sys.stderr  # a notebook shows standard error as a failure
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
        f"step {step['step']}/{total}",
        f"epoch {step['epoch'] + 1}",
        *([f"ETA {format_duration(left)} to the last step"] if math.isfinite(left) else []),
        f"loss {step['loss']:.4f}",
        *([] if valid is None else [f"valid {valid:.4f}"]),
        f"{step['samples_per_second']:,.0f} samples/s",
    ]
    return " · ".join(parts)

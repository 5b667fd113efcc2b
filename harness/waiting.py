"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def until(
    true: Callable[[], Any], what: Callable[[], Any] = lambda: "", seconds: float = 60.0,
    can_come: Callable[[], bool] = lambda: True,
) -> None:  # fmt: skip
    """Wait for something; fail with ``what`` when the time is over, or at once when it cannot come any more."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what()
        assert can_come(), what()
        time.sleep(0.01)


@contextmanager
def frozen(program: str, *arguments: str) -> Iterator[Callable[[], str]]:
    """A program that freezes itself, once it has; the function lets it go on, and returns what it has printed."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

        def thaw() -> str:
            os.kill(process.pid, signal.SIGCONT)
            return process.communicate(timeout=60)[0]

        try:
            until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
            yield thaw
        finally:
            process.kill()

"""How a process that a test started is ended."""

from __future__ import annotations

import subprocess
from typing import Any


def end(process: subprocess.Popen[Any], seconds: float) -> None:
    """Asked, and killed after so long; its standard input stays open until then, for those that leave with it."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()

"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable
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

"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_LONGEST_PAUSE = 1.0


def until(
    true: Callable[[], Any],
    what: str | Callable[[], Any] = "",
    seconds: float = 90.0,
    can_come: Callable[[], bool] = lambda: True,
    pause: float = 0.05,
) -> Any:
    """Wait until something is true, and return it. Fail when the time is over, or at once when it cannot come any more.
    ``what`` is waited for, or says what there is instead; ``pause``: seconds between two looks, at least, for a look
    that asks a service would keep it busy with nothing else: four times as long as the look took."""
    end = (begun := time.monotonic()) + seconds
    while not (found := true()):
        looked = time.monotonic()
        is_late = looked >= end
        if is_late or not can_come():
            why = f"waited {seconds:.0f} s in vain" if is_late else "it cannot come any more"
            raise AssertionError(f"{why}: {what() if callable(what) else what}")
        time.sleep(max(pause, min(4 * (looked - begun), _LONGEST_PAUSE)))
        begun = time.monotonic()
    return found

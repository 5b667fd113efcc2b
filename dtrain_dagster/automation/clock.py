"""Was the machine's clock set between two looks of a sensor? What waits since a moment then waits since another.

Hours that pass while nobody looks, or while the machine is switched off, are time that has passed; a clock that is set
is not. The two are told apart by the kernel's own count of seconds, which a sensor keeps in its cursor beside the time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.runtime import clock

NOTICEABLE_SECONDS = 60.0
"""By less a clock is corrected, now and then."""


def reading() -> dict[str, Any]:
    """For a cursor: which start of the machine this is, and the time at which its count was 0."""
    return {"boot": _boot(), "origin": time.time() - clock.elapsed()}


def count() -> float:
    """Seconds since the machine was started, whatever its clock was set to."""
    return clock.elapsed()


def set_by(before: Any, now: Mapping[str, Any]) -> float:
    """By how many seconds the clock was set between two readings, negative for back; 0 where that cannot be told,
    since the machine was started in between, or the cursor is of an older version. Pure."""
    if not isinstance(before, Mapping) or before.get("boot") != now["boot"] or not now["boot"]:
        return 0.0
    origin = before.get("origin")
    if isinstance(origin, bool) or not isinstance(origin, int | float):
        return 0.0
    seconds = float(now["origin"]) - origin
    return seconds if NOTICEABLE_SECONDS <= abs(seconds) < float("inf") else 0.0


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""

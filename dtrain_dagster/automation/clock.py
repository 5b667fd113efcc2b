"""Detection of a machine clock that was set between two looks of a sensor, so that waiting times can be corrected.

Hours that pass while nothing looks, or while the machine is switched off, are time that has passed; a clock that is set
is not. The kernel's own count of seconds, which a sensor keeps in its cursor beside the time, tells the two apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.runtime import clock

NOTICEABLE_SECONDS = 60.0
"""The smallest change that counts as a setting. Smaller ones are ordinary corrections."""


def reading() -> dict[str, Any]:
    """Return the clock's state for a cursor: the boot id, the kernel's count of seconds, and the Unix time at which
    that was 0."""
    counted = clock.elapsed()
    return {"boot": _boot(), "origin": time.time() - counted, "count": counted}


def count() -> float:
    """Return the seconds since the machine was started, whatever its clock was set to."""
    return clock.elapsed()


def set_by(before: Any, now: Mapping[str, Any]) -> float:
    """Return by how many seconds the clock was set between two readings, negative for back. Pure.

    Return 0 where that cannot be told: the machine was started in between, or the cursor is of an older version.
    """
    if not isinstance(before, Mapping) or before.get("boot") != now["boot"] or not now["boot"]:
        return 0.0
    origin = before.get("origin")
    if isinstance(origin, bool) or not isinstance(origin, int | float):
        return 0.0
    seconds = float(now["origin"]) - origin
    return seconds if NOTICEABLE_SECONDS <= abs(seconds) < float("inf") else 0.0


def elapsed_between(before: Any, now: Mapping[str, Any]) -> float | None:
    """Return the seconds between two readings by the kernel's count; None where it cannot tell, see `set_by`. Pure."""
    known = isinstance(before, Mapping) and before.get("boot") == now["boot"] and now["boot"]
    counted = before.get("count") if known else None
    return None if isinstance(counted, bool) or not isinstance(counted, int | float) else now["count"] - counted


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""

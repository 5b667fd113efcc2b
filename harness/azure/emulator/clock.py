"""The emulator's time: the machine's, plus what was skipped. Idle times, billing and deadlines follow it."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable

_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")


class Clock:
    """Seconds since the epoch, which a test can move forward."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> float:
        return time.time() + self._skipped

    def advance(self, seconds: float, tick: Callable[[], None]) -> None:
        """Skip so much time, in small steps, with a ``tick`` in each: what is due happens when it is due, not at the
        end. Nodes that are released after 600 idle seconds cost 600 seconds, even if an hour is skipped."""
        if seconds < 0:
            raise ValueError(f"the clock goes forward only, not {seconds} s")
        step = max(1.0, seconds / 3600)
        while seconds > 0:
            moved = min(step, seconds)
            self._skipped += moved
            seconds -= moved
            tick()


def iso(seconds: float | None) -> str | None:
    """As ARM writes times: ``2025-11-04T10:20:30.123456Z``."""
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def duration_seconds(text: str) -> float:
    """``PT10M`` → 600.0. ValueError for what is no ISO 8601 duration of days, hours, minutes and seconds."""
    found = _DURATION.fullmatch(text)
    if not found or not any(found.groups()):
        raise ValueError(f"{text!r} is no duration like PT2M")
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

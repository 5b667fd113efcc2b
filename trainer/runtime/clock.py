"""Unix time that does not jump: what durations are taken from that are paid for, or that somebody is ended by.

A machine's clock is set while jobs run: by its time service, by a person, after a suspension. The kernel counts seconds
beside it (CLOCK_BOOTTIME, those of a suspension included). Here they are counted on from what the clock said first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ORIGIN = "DTRAIN_CLOCK"
"""Unix time at which the kernel's count was 0, for processes of one machine that share a clock; set by who starts
them."""
NOTICEABLE_SECONDS = 1.0
"""Time services move a clock by less, a little at a time."""


def elapsed() -> float:
    """Seconds that the kernel has counted since this machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class SteadyClock:
    """Goes on from ``origin`` by the kernel's count, whatever happens to the machine's clock."""

    origin: float
    """Unix time at which the count was 0."""
    count: Callable[[], float] = elapsed
    wall: Callable[[], float] = time.time

    @classmethod
    def begin(cls, not_before: float = 0.0) -> SteadyClock:
        """One that says what the machine's clock says now. ``not_before``: where that is earlier than what has been
        recorded already, the clock was set back, and this one goes on from there."""
        return cls(max(time.time(), not_before) - elapsed())

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SteadyClock:
        """The clock that whoever started this process goes by; a new one where none is named."""
        try:
            origin = float(environment[ORIGIN])
        except (KeyError, ValueError):
            return cls.begin()
        return cls(origin) if abs(origin) < 1e11 else cls.begin()

    def now(self) -> float:
        return self.origin + self.count()

    def jump(self) -> float:
        """By how many seconds the machine's clock has left this one, negative where it was set back."""
        seconds = self.wall() - self.now()
        return seconds if abs(seconds) >= NOTICEABLE_SECONDS else 0.0

    def variables(self) -> dict[str, str]:
        """For the environment of processes that shall go by this clock."""
        return {ORIGIN: repr(self.origin)}


_of_this_process: SteadyClock | None = None


def now() -> float:
    """Unix time by this process's clock, for what is recorded."""
    return this().now()


def this() -> SteadyClock:
    """This process's clock: that of whoever started it, where one is named (`ORIGIN`)."""
    global _of_this_process
    if _of_this_process is None:
        _of_this_process = SteadyClock.of(os.environ)
    return _of_this_process

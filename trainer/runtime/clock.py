"""Unix time that does not jump, for durations that are paid for, or that lead to a process being ended.

A machine's clock is set while jobs run: by its time service, by a person, after a suspension. The kernel counts seconds
beside it (CLOCK_BOOTTIME, which includes suspensions). This clock adds that count to the machine's first time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ORIGIN = "DTRAIN_CLOCK"
"""The environment variable with the Unix time at which the kernel's count was 0, set by the parent for processes of one
machine that share a clock."""
NOTICEABLE_SECONDS = 1.0
"""The smallest difference that counts as a jump: time services move a clock by less, a little at a time."""


def elapsed() -> float:
    """Return the seconds that the kernel has counted since this machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class SteadyClock:
    """A clock that starts from ``origin`` and follows the kernel's count, whatever happens to the machine's clock."""

    origin: float
    """Unix time at which the count was 0."""
    count: Callable[[], float] = elapsed
    wall: Callable[[], float] = time.time

    @classmethod
    def begin(cls, not_before: float = 0.0) -> SteadyClock:
        """Return a clock that starts at the machine's time, or at ``not_before`` where that is later: the machine's
        clock was then set back since that time was recorded."""
        return cls(max(time.time(), not_before) - elapsed())

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SteadyClock:
        """Return the clock that the parent process has named in the environment; a new one where none is named."""
        try:
            origin = float(environment[ORIGIN])
        except (KeyError, ValueError):
            return cls.begin()
        return cls(origin) if abs(origin) < 1e11 else cls.begin()

    def now(self) -> float:
        """Return Unix time in seconds."""
        return self.origin + self.count()

    def jump(self) -> float:
        """Return the seconds by which the machine's clock differs from this one, negative where it was set back; 0
        below `NOTICEABLE_SECONDS`."""
        seconds = self.wall() - self.now()
        return seconds if abs(seconds) >= NOTICEABLE_SECONDS else 0.0

    def variables(self) -> dict[str, str]:
        """Return the environment variables for processes that shall use this clock."""
        return {ORIGIN: repr(self.origin)}


_of_this_process: SteadyClock | None = None


def now() -> float:
    """Return Unix time in seconds by this process's clock, for records."""
    return this().now()


def this() -> SteadyClock:
    """Return this process's clock: the parent's where the environment names one (`ORIGIN`)."""
    global _of_this_process
    if _of_this_process is None:
        _of_this_process = SteadyClock.of(os.environ)
    return _of_this_process

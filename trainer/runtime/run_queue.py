"""The time for which a thread was ready to run and no core was free, as the kernel counts it; and the machine's cores.

Ranks that share cores with each other, or with other work, are late without being slow. Only the kernel can tell that
apart from computing: a thread in the run queue uses no processor time, and it does not sleep either.
"""

from __future__ import annotations

import os
import platform
import weakref
from hashlib import sha256
from pathlib import Path

from trainer.runtime.affinity import AVAILABLE

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LONGEST_LINE = 80


class RunQueueClock:
    """A clock of the thread that makes it: it goes on while the thread waits for a core. Any thread may read it."""

    def __init__(self) -> None:
        self._file: int | None = None
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux, or a kernel that does not count it
            return
        weakref.finalize(self, os.close, self._file)

    def seconds(self) -> float | None:
        """Return the seconds so far; None where the kernel does not tell."""
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file, _LONGEST_LINE, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            self._file = None
            return None


def machine_number() -> int:
    """Return a number that is the same for all processes of one machine, containers included, and another one on
    another machine. A float holds it exactly."""
    try:
        name = _BOOT.read_text()
    except OSError:
        name = platform.node()
    return int.from_bytes(sha256(name.encode()).digest()[:6])


def available_cores() -> int:
    """Return the number of cores that this process may use, whether or not its threads are bound to some of them."""
    return len(AVAILABLE)

"""The end of a process with its parent: the kernel kills it, however the parent ends.

What a process does before it ends, and who ends it in order, does not belong here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens; where it can. The kernel watches
    the parent's thread that has started this process."""
    if _libc is None:
        return
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked

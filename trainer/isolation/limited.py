"""Sets limits to this process, then runs a command in its place:
``python -I limited.py PARENT MEMORY_BYTES CPU_SECONDS FILE_BYTES COMMAND…``.

The limits hold for all that the command starts, and cannot be lifted. Where the parent ends, the command ends. Nothing
of this project is imported, so `trainer.runtime.parent_death` is not either.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PDEATHSIG = 1


def main(parent: str, memory: str, cpu_seconds: str, file_bytes: str, *command: str) -> None:
    """Bound memory (beyond what is mapped from files), processor time and the size of written files; allow no core
    dumps; let the kernel end this process first if memory runs out; run the command."""
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(cpu_seconds)),
        (resource.RLIMIT_FSIZE, int(file_bytes)),
        (resource.RLIMIT_DATA, int(memory)),
        (resource.RLIMIT_AS, int(memory) + (16 << 30)),
        (resource.RLIMIT_NOFILE, 1024),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (value, value))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("the parent has ended")  # before the kernel was asked
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The limit on the files and connections that this process may have open."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files and connections as the system allows.

    The usual limit of 1,024 is for programs that use select(2). Gloo ends a process that runs out of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # where the system refuses, the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

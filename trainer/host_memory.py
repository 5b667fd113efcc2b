"""How much memory this process may fill: what the machine can free, and what its control group allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that could be filled with the page cache of a file, as far as can be told."""
    return min([psutil.virtual_memory().available, *group_limits()])


def group_limits(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Limits of the control groups, of version 1 or 2, that this process is in. None where there are none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path)
        for group in (own, *own.parents):  # in a container the path may be the host's: then only the top is there
            try:
                text = (top / group.relative_to("/") / name).read_text().strip()
            except (OSError, ValueError):
                continue
            if text.isdecimal():
                yield int(text)

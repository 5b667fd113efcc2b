"""The memory that this process may fill, by machine and control group, and what the C library does with memory that is
freed.

Running out of memory is handled in `trainer.engine.out_of_memory`.
"""

from __future__ import annotations

import ctypes
import platform
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def available_bytes() -> int:
    """Return the bytes that could be filled with the page cache of a file, as far as it is known."""
    return min([psutil.virtual_memory().available, *group_room()])


def machine_bytes() -> int:
    """Return the bytes of the machine's memory."""
    return int(psutil.virtual_memory().total)


def allocatable_bytes() -> tuple[int, int]:
    """Return the bytes that this process may still allocate, and those that it may have in all: by the machine, by its
    control group and by its own limits (``ulimit -v``, ``ulimit -d``)."""
    held, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    found = [(machine.available, machine.total), *((room, room + held.rss) for room in group_room())]
    for kind, used in ((resource.RLIMIT_AS, held.vms), (resource.RLIMIT_DATA, held.data)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            found.append((max(0, limit - used), limit))
    return min(found)


def group_room(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the bytes that each limited control group of this process, of version 1 or 2, still has room for; the page
    cache of files that are not in use makes way. Yield nothing where there are no limits."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = PurePosixPath(path)
        for group in (own, *own.parents):  # in a container the path may be the host's: then only the top is there
            limit, held, idle = _numbers(top / group.relative_to("/"), *names)
            if limit is not None:
                yield max(0, limit - max(0, (held or 0) - (idle or 0)))


def _numbers(folder: Path, limit: str, held: str, idle: str) -> tuple[int | None, int | None, int | None]:
    """Return the three numbers, None for each that is missing or no number."""
    found = []
    for name in (limit, held, "memory.stat"):
        try:
            text = (folder / name).read_text().strip()
        except (OSError, ValueError):
            text = ""
        if name == "memory.stat":
            text = dict(line.partition(" ")[::2] for line in text.splitlines()).get(idle, "")
        found.append(int(text) if text.isdecimal() else None)
    return found[0], found[1], found[2]


def keep_freed_memory() -> None:
    """Have the C library keep large freed blocks for the next step, instead of giving them back to the kernel, which
    would hand them out again page by page, zeroed: with large batches, that took up to half of a step's time on a CPU.
    The process never shrinks, and where sizes vary it grows up to 1.8 times beyond what it ever needed at once, since
    free memory lies in pieces: call `give_back_freed_memory` after such work. Nothing happens where the library is not
    glibc."""
    if (library := _glibc()) is None:
        return
    if not library.mallopt(_M_MMAP_THRESHOLD, 1 << 30):
        library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes before version 2.35
    library.mallopt(_M_TRIM_THRESHOLD, -1)  # never
    library.mallopt(_M_TOP_PAD, 16 << 20)


def give_back_freed_memory() -> None:
    """Give freed memory back to the kernel once, after work with other sizes than those of the next steps."""
    if (library := _glibc()) is not None:
        library.malloc_trim(ctypes.c_size_t(0))


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None

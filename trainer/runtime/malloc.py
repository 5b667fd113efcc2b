"""Settings of the C library for memory that a training frees: kept for the next step, or given back to the kernel.

Running out of memory is handled in `trainer.engine.out_of_memory`; how much there is tells `host_memory`.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


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

"""The lock of a run directory, which is held as long as a supervisor, or a process that it started, lives.

Process ids are used again, and a file that says ``running`` outlives its writer; a lock does neither. It belongs to an
open file, which the submitter hands over to the supervisor it starts, so that there is no gap in between.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import DamagedError

LOCK = "supervisor.lock"


def acquire(folder: Path) -> int | None:
    """Return a descriptor that holds the lock until every copy is closed; None if it is held. Raise `DamagedError`."""
    descriptor = _open(folder, os.O_RDWR | os.O_CREAT)
    while True:
        if _lock(descriptor, fcntl.LOCK_EX):
            return descriptor
        if not _lock(descriptor, fcntl.LOCK_SH):
            os.close(descriptor)
            return None
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # only a caller of `is_held`: over in a moment
        time.sleep(0.001)


def is_held(folder: Path) -> bool:
    """Return whether a supervisor, or a submitter about to start one, holds the lock."""
    with undisturbed(folder) as is_free:
        return not is_free


@contextmanager
def undisturbed(folder: Path) -> Iterator[bool]:
    """Yield whether the lock is free. While the block lasts nothing can acquire it, and a process that tries waits;
    other callers of this function are not disturbed. Raise `DamagedError` where a link stands in its place."""
    try:
        descriptor = _open(folder, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _open(folder: Path, mode: int) -> int:
    try:
        return os.open(folder / LOCK, mode | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise DamagedError(str(folder / LOCK), "it is a link", "remove it once nothing of the job runs") from None


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

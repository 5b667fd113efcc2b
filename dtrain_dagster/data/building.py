"""A folder in which something is built before it gets its name, and what killed builders have left of theirs."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEFT_SECONDS = 60.0
"""A folder without a builder is swept once nothing has been made in it for so long: it may be about to be locked."""


@contextmanager
def building_in(parent: Path) -> Iterator[Path]:
    """A new folder ``building-….tmp`` in ``parent``, which is made where it is missing. What is left of it at the end
    is removed; where this process is killed, whoever builds next does that."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(parent)
    folder = parent / f"building-{uuid.uuid4().hex[:8]}.tmp"
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: there nobody sweeps
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep_leftovers(parent: Path) -> None:
    """Remove the folders of builders that were killed. What is built by a process that lives is locked by it."""
    for folder in parent.glob("building-*.tmp"):
        with suppress(OSError):
            if abs(time.time() - folder.stat(follow_symlinks=False).st_mtime) < LEFT_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

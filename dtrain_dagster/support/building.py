"""Folders in which something is built before it gets its name, and the removal of those that killed builders left."""

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
"""The least age, in seconds since the last new entry, of a folder that is swept: a younger one may be about to be
locked."""


@contextmanager
def building_in(parent: Path) -> Iterator[Path]:
    """Yield a new folder in ``parent``, removed at the end; of a killed process, by the next builder."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep_leftovers(parent)
    folder = parent / f"building-{uuid.uuid4().hex[:8]}.tmp"
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # on a file system without locks nothing is swept
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep_leftovers(parent: Path) -> None:
    """Remove the folders of builders that were killed. A live builder holds a lock on its folder."""
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

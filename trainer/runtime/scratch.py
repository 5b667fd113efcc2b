"""Temporary folders for the files of a model while it is checked. They are removed after the check; those of a killed
process are removed at the start of the next one.

A lock, which ends with its process, tells whether the owner of a folder lives: not the folder's age, nor a process
number, which may be another's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "dtrain-"
LOCK = ".made-by-dtrain"
"""The lock file beside the files, held by the owner. A folder without one was not made here, and stays."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """Yield an empty folder that only this user can access; it is removed when the block ends."""
    sweep_scratch(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{what}-") as name:
        new = Path(name, f"{LOCK}.new")
        with open(os.open(new, _FILE | os.O_CREAT | os.O_EXCL, 0o600), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(new.with_name(LOCK))  # only now, so that nobody finds it and gets the lock
            files = Path(name, "files")
            files.mkdir(mode=0o700)
            yield files


def sweep_scratch(parent: Path) -> None:
    """Remove the folders that killed processes of this user have left. Nothing else is touched, no link is followed."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # it is held, or another's, or has just gone
                    _sweep(Path(entry.path))


def _sweep(folder: Path) -> None:
    """Remove one such folder. Raise OSError where it must stay."""
    place = os.open(folder, _FOLDER)
    try:
        about = os.fstat(place)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
            return
        with open(os.open(LOCK, _FILE, dir_fd=place), "rb") as lock:
            about = os.fstat(lock.fileno())
            if about.st_uid != os.geteuid() or not stat.S_ISREG(about.st_mode):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(place)

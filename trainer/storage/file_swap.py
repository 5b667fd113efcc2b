"""Compare-and-swap of a file on a local or network file system, by renames alone.

A lock that its holder must give back (flock) would be kept for ever by a process that is frozen while it has it, and
a process that broke it would be overwritten by the frozen one once that wakes. Here the lock is a folder whose *name*
says which process has it: ``LATEST.json.lock/free``, or ``LATEST.json.lock/<id of its holder>``. Taking it, giving it
back and taking it from a silent holder are renames of that folder, of which only one can succeed. The new content lies
in the folder and is moved from there over the old one: a process that has lost the folder can replace nothing any more,
however late it wakes.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

PATIENCE_SECONDS = 1.0
"""A holder that has the lock for this long is dead or frozen: it needs it for a few renames."""
TIMEOUT_SECONDS = 30.0
_FREE = "free"


def swap_file(path: str, expected: bytes | None, data: bytes) -> bool:
    """Replace a file by ``data`` if its content is ``expected`` (None: if it is missing); return whether it was
    replaced.

    Of several writers that expect the same content, one succeeds. Raise OSError if the file system refuses, and
    TimeoutError if the lock could not be taken within 30 s.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            write_through(temporary, data)  # the slow part, before the lock is taken
            holding = _take(f"{path}.lock", deadline)
            try:
                if _read(path) != expected:
                    return False
                content = f"{holding}/{os.path.basename(holding)}"
                os.rename(temporary, content)
                os.replace(content, path)
                return True
            finally:
                _give_back(holding)
        except FileNotFoundError:  # another process took the lock or deleted the folder: start again
            if time.monotonic() > deadline:
                raise
        finally:
            Path(temporary).unlink(missing_ok=True)


def write_through(path: str, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


def _take(lock: str, deadline: float) -> str:
    """Take the folder in ``lock`` and return its new path."""
    mine = f"{lock}/{uuid.uuid4().hex}"
    seen, since = "", time.monotonic()
    while True:
        owner = _owner(lock)
        if owner is not None and owner != seen:
            seen, since = owner, time.monotonic()
        if owner == _FREE or (owner is not None and time.monotonic() - since > PATIENCE_SECONDS):
            try:
                os.rename(f"{lock}/{owner}", mine)
            except FileNotFoundError:
                continue
            for left in os.listdir(mine):  # of the one that had it: it must not get it over the file any more
                with suppress(FileNotFoundError):  # unless it just has
                    os.unlink(f"{mine}/{left}")
            return mine
        if time.monotonic() > deadline:
            raise TimeoutError(f"{lock} could not be acquired within {TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.002)


def _give_back(holding: str) -> None:
    with suppress(FileNotFoundError):  # somebody took it from us
        os.rename(holding, f"{os.path.dirname(holding)}/{_FREE}")


def _owner(lock: str) -> str | None:
    """Return the name of the folder in ``lock``, or None to look again. A missing lock is made."""
    try:
        names = os.listdir(lock)
    except FileNotFoundError:
        _make(lock)
        return None
    if not names:  # half deleted by somebody
        with suppress(OSError):  # unless the listing had met a rename
            os.rmdir(lock)
    return names[0] if len(names) == 1 else None


def _make(lock: str) -> None:
    """Make the lock with one free folder in it, at once: it must never be seen without, nor get a second one."""
    temporary = f"{lock}.{uuid.uuid4().hex[:8]}.tmp"
    os.makedirs(f"{temporary}/{_FREE}")
    try:
        os.rename(temporary, lock)
    except OSError:  # somebody was faster: a rename replaces no folder that has something in it
        shutil.rmtree(temporary)
        if not os.path.isdir(lock):
            raise

"""A lock between processes of one machine, with a limit to the wait.

Locks that are handed over to a child, shared, or of a folder are not here: filelock has none of these.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import DamagedError

_NO_LOCK_FILE = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ENXIO)
_log = logging.getLogger(__name__)


@contextmanager
def hold_lock(path: str | os.PathLike[str], patience_seconds: float) -> Iterator[bool]:
    """Hold the lock ``path``, a file that is made where it is missing, within the block; it ends with its process,
    however that ends. Yield whether it is held. It is not where another process has had it for as long as
    ``patience_seconds`` (one that is frozen), nor where the file cannot be locked (a file system without locks, or
    read-only), which is logged. Raise `DamagedError` where something else is in its place."""
    from filelock import FileLock, Timeout  # not above: most importers of this module lock nothing

    lock = FileLock(path, timeout=patience_seconds, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        pass
    except OSError as error:
        if error.errno in _NO_LOCK_FILE:  # nodes may have put anything there, and a link would create a file elsewhere
            raise DamagedError(str(path), f"something else is in place of a lock ({error.strerror})") from None
        _log.warning("%s cannot be locked (%s): continuing without a lock", path, error)
    try:
        yield lock.is_locked
    finally:
        lock.release()

"""A lock between processes of one machine that nobody waits for for ever.

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
    """Within, no other process of this machine holds the lock ``path``, a file that is made where it is missing; it
    ends with its process, however that ends. Gives whether it is held: not where somebody else has had it for as long
    as ``patience_seconds`` (a process that is frozen), and not where it cannot be locked (a file system without locks,
    or that cannot be written), which is logged. Raises `DamagedError` where something else is in its place."""
    from filelock import FileLock, Timeout  # not above: most that import this lock nothing

    lock = FileLock(path, timeout=patience_seconds, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        pass
    except OSError as error:
        if error.errno in _NO_LOCK_FILE:  # nodes may have put anything there: a link would have a file made elsewhere
            raise DamagedError(str(path), f"something else is in place of a lock ({error.strerror})") from None
        _log.warning("%s cannot be locked (%s): going on without", path, error)
    try:
        yield lock.is_locked
    finally:
        lock.release()

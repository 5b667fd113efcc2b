"""Reading of files in a local folder that others may write to: only regular files inside the folder are opened."""

from __future__ import annotations

import errno
import os
import stat
from typing import IO

from trainer.errors import DamagedError

_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC | os.O_DIRECTORY
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(root: str, name: str) -> IO[bytes]:
    """Open a file of a folder for reading. ``root`` may be, or lead through, a symbolic link; nothing below it may.

    Raise FileNotFoundError if it is missing, and `DamagedError` for a link, a pipe, a device, a socket or a folder
    in its place: none of them is followed or waited for.
    """
    *folders, file = name.split("/")
    where = f"{root}/{name}"
    try:
        if not folders:
            descriptor = os.open(where, _FILE)
        else:
            at = os.open(root, _FOLDER)
            try:
                for folder in folders:
                    before, at = at, _open_folder(at, folder, where)
                    os.close(before)
                descriptor = os.open(file, _FILE, dir_fd=at)
            finally:
                os.close(at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise DamagedError(where, "a symbolic link is in its place") from None
        if error.errno in (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP):
            raise DamagedError(where, "it is not a regular file") from None
        error.filename = where  # not the part of it that was looked for
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise DamagedError(where, f"{_KINDS.get(stat.S_IFMT(mode), 'something else')} is in its place")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_regular(root: str, name: str, most_bytes: int) -> bytes:
    """Return the content of a file, see `open_regular`. Raise `DamagedError` if it has more than ``most_bytes``."""
    with open_regular(root, name) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most_bytes else _read(file, most_bytes + 1, size)
    if max(size, len(data)) > most_bytes:
        raise too_large(f"{root}/{name}", max(size, len(data)), most_bytes)
    return data


def require_folder(root: str, name: str) -> bool:
    """Return whether the folder exists. Raise `DamagedError` if anything else is in its place."""
    try:
        mode = os.lstat(f"{root}/{name}").st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise DamagedError(f"{root}/{name}", f"{_KINDS.get(stat.S_IFMT(mode), 'a file')} is in place of a folder")
    return True


def too_large(where: str, size: int, most_bytes: int) -> DamagedError:
    """Return the error for a file of ``size`` bytes where at most ``most_bytes`` are allowed."""
    return DamagedError(where, f"it has {size:,} bytes, and such a file has at most {most_bytes:,}")


def _open_folder(at: int, folder: str, where: str) -> int:
    try:
        return os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except NotADirectoryError:
        raise DamagedError(where, f"{folder!r} is no folder") from None


def _read(file: IO[bytes], most: int, size: int) -> bytes:
    """Up to ``most`` bytes. One read is enough for a file that does not change meanwhile."""
    pieces: list[bytes] = []
    left, step = most, min(most, size + 1)
    while left > 0:
        piece = file.read(min(step, left))
        pieces.append(piece)
        left -= len(piece)
        if len(piece) < step:
            break
        step = 1 << 16
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

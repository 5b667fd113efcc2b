"""Names that become parts of paths, and folders that are this user's alone.

What comes from outside (a manifest, a command line, a service) may name files and folders only through `inside` and
`checked_id`: it cannot leave its folder, by dots, by an absolute path or by a link.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""The form of the name of a dataset, a job or a cluster: one component of a path, and never one of dots alone."""
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,199}")


class PlaceError(ValueError):
    """An error for a name or a folder that cannot be used. The message names it and the remedy."""


def checked_id(name: object, what: str) -> str:
    """Return the name if it is a valid id. Raise `PlaceError`, which begins with ``what``, for anything else."""
    if not isinstance(name, str) or not ID.fullmatch(name):
        raise PlaceError(
            f"{what} is {str(name)[:80]!r}: use at most 200 letters, digits, dots, dashes and underscores, a letter "
            "or digit first"
        )
    return name


def checked_name(name: object, what: str) -> str:
    """Return the name if it is a relative path such as ``data/shard-00000.parquet``: components of letters, digits and
    ``._=-``, separated by single slashes. Raise `PlaceError`, which begins with ``what``, for anything else. It holds
    for storage of any kind."""
    if not isinstance(name, str) or not all(_COMPONENT.fullmatch(part) for part in name.split("/")):
        raise PlaceError(f"{what} is {str(name)[:80]!r}, which is not a relative path of plain names: rebuild it")
    return name


def inside(folder: str | os.PathLike[str], name: object, what: str) -> Path:
    """Return the path of `checked_name` in a folder of this machine. Raise `PlaceError` if a link leads out of the
    folder. The path need not exist."""
    root = Path(folder)
    path = root / checked_name(name, what)
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise PlaceError(f"{what} is {str(name)[:80]!r}, which is a link out of {root}: rebuild it")
    return path


def own_folder(folder: str | os.PathLike[str], remedy: str) -> Path:
    """Return a folder that this user alone can write; make it (0700) if it is missing.

    A folder of this user that others could write is closed to them. Raise `PlaceError`, with the remedy, if it belongs
    to another user or is shared by all as a temporary folder is. A link of this user counts as its target. The owner is
    checked, so a user who can write to the parent folder cannot replace it unnoticed.
    """
    path = Path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    me = os.geteuid()
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        if found.st_uid != me:
            raise PlaceError(f"{path} is a link of another user (uid {found.st_uid}): {remedy}")
        found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise PlaceError(f"{path} is not a folder: {remedy}")
    if found.st_uid != me:
        raise PlaceError(
            f"{path} belongs to another user (uid {found.st_uid}), who could change what is in it: {remedy}"
        )
    if found.st_mode & stat.S_ISVTX and found.st_mode & 0o022:
        raise PlaceError(f"{path} is shared by all users of this machine: {remedy}, such as {path}/dtrain-{me}")
    if found.st_mode & 0o022:
        os.chmod(path, stat.S_IMODE(found.st_mode) & ~0o022)
    return path

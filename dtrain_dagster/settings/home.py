"""The folder that this project writes on this machine (DTRAIN_HOME): made, marked as its own, and removed again.

Removal is the only operation here that can destroy a user's own files, so it takes away names that this project is
known to write and nothing more, and refuses wherever it cannot be sure.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from dtrain_dagster.support.job_lock import LOCK, is_held

DEFAULT = ".dtrain"
"""The name of the home where none is given."""
MARKER = ".dtrain-home"
"""The file that marks a folder as a home of this project. Without it nothing there is removed."""
MARKER_TEXT = "This folder was made by dtrain, which keeps everything here that it writes. `make clean` removes it.\n"
WORK_LOCK = "work.lock"
"""The lock that `make run` holds while it is at work on the home."""
OURS = (
    MARKER, WORK_LOCK, "storage", "clusters", "orders", "secrets", "cache", "dagster", "audit", "mlartifacts",
    "mlflow.db", "mlflow.db-*", "mlflow.db.*", "prices.json", "prices.json.*", "ceilings.json", "ceilings.json.*",
    "spending",
)  # fmt: skip
"""Patterns of the names that this project writes directly below its home."""


class HomeError(ValueError):
    """A refusal of a home that cannot be used or removed. The message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Removal:
    """The entries of a home that `plan_removal` has found."""

    home: Path
    ours: tuple[str, ...]
    """The entries that are removed."""
    others: tuple[str, ...]
    """The entries of other origin: they stay, and the folder with them."""


def find_home(start: Path) -> Path:
    """Return the home that a command started in this folder works on, where DTRAIN_HOME does not say: the marked one
    that the folder, or one above it, is or holds; else `DEFAULT` in this folder. A home of another user does not count:
    whoever can write above this folder must not decide what runs."""
    for folder in (start, *start.parents):
        for home in (folder, folder / DEFAULT):
            try:
                owner = os.lstat(home / MARKER).st_uid, os.lstat(home).st_uid
            except OSError:
                continue
            if owner == (os.geteuid(), os.geteuid()):
                return home
    return start / DEFAULT


def is_ours(name: str) -> bool:
    """Return whether this is a name that this project writes directly below its home."""
    return any(fnmatch(name, pattern) for pattern in OURS)


def make_home(home: Path) -> Path:
    """Make the home where it is missing, and mark it; return its path.

    A folder with other entries than this project's own is used, but not marked: it belongs to a user, and `make clean`
    must not take it away. Raise `HomeError` where it cannot be written, in one sentence.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        marker = home / MARKER
        if not marker.exists() and all(map(is_ours, os.listdir(home))):
            marker.write_text(MARKER_TEXT)
        elif not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise HomeError(unwritable(home, error)) from error
    return home


def unwritable(home: Path | str, error: OSError) -> str:
    """Return the sentence for a home that cannot be written: where, why, and the remedy."""
    return (
        f"{home} cannot be written ({error.strerror or error}); make room there, or set DTRAIN_HOME to a folder that "
        "can be written"
    )


def plan_removal(home: Path, protected: Sequence[Path]) -> Removal:
    """Return what would be removed of this home. Raise `HomeError`, with the reason and the remedy, for a folder that
    must stay.

    ``protected``: folders that must outlast it, such as the repository; neither they nor a parent of them is removed.
    """
    if home.is_symlink():
        raise HomeError(f"{home} is a symbolic link: set DTRAIN_HOME to the folder itself, {home.resolve()}")
    if not home.exists():
        return Removal(home, (), ())
    if not home.is_dir():
        raise HomeError(f"{home} is not a folder: DTRAIN_HOME must name a home of dtrain")
    real = home.resolve()
    for keep in (Path("/"), *protected):
        if keep.resolve().is_relative_to(real):
            raise HomeError(
                f"{home} is {keep} or a folder above it, which is not removed: set DTRAIN_HOME to another folder"
            )
    names = sorted(os.listdir(home))
    if not (home / MARKER).is_file() or (home / MARKER).is_symlink():
        raise HomeError(
            f"{home} is not marked as a home of dtrain (it has no file {MARKER}), so nothing is removed. If dtrain "
            "made it, `python -m dtrain_dagster setup` marks it, unless it holds something else as well; else remove "
            "it by hand"
        )
    import psutil  # not above: loading the code location does without

    mounts = [Path(part.mountpoint) for part in psutil.disk_partitions(all=True)]
    if mounted := [point for point in mounts if point.is_relative_to(real)]:
        raise HomeError(f"{mounted[0]} is mounted inside {home}: unmount it first, or remove the home by hand")
    if busy := running_jobs(home):
        raise HomeError(
            f"{', '.join(busy[:5])}{' …' if len(busy) > 5 else ''} run in {home}: end them first, with "
            f"`dtrain cancel {busy[0]}`"
        )
    others = tuple(name for name in names if not is_ours(name))
    stays = (MARKER, WORK_LOCK) if others else ()  # it stays the home of the entries that are left
    return Removal(home, tuple(name for name in names if name not in others + stays), others)


def remove(removal: Removal) -> None:
    """Remove the planned entries, and the folder where nothing else is in it. Links are removed, never followed. The
    marker goes last, so that an interrupted removal can be repeated. Raise `HomeError` where the file system
    refuses."""
    names = sorted(removal.ours, key=lambda name: name == MARKER)
    try:
        for name in names:
            path = removal.home / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if not removal.others and removal.home.exists():
            removal.home.rmdir()
    except OSError as error:
        raise HomeError(f"{error.filename or removal.home} cannot be removed ({error.strerror or error})") from error


def running_jobs(home: Path) -> list[str]:
    """Return the jobs of the local cluster in this home that a supervisor looks after now, unfinished starts
    included."""
    return sorted(path.parent.name for path in home.glob(f"storage/jobs/*/{LOCK}") if is_held(path.parent))


@contextlib.contextmanager
def hold_home(home: Path, what: str) -> Iterator[int]:
    """Keep other processes from working on or removing this home within the block; yield the lock's descriptor, for a
    child to inherit.

    Raise `HomeError` where the home is held, with the holder's ``what`` and its process.
    """
    try:
        descriptor = os.open(home / WORK_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HomeError(unwritable(home, error)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(descriptor, 200, 0).decode(errors="replace").split("\n")[0]
            raise HomeError(
                f"{said or 'another process'} is at work on {home}: wait until it has ended, or set DTRAIN_HOME (and "
                "DAGSTER_HOME) to another folder"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{what} (process {os.getpid()})\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)

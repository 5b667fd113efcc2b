"""The list of all jobs, kept up to date by looking only at what has changed, for any number of readers.

The reader that finds the list old looks at the run directories itself, and the others take the list as it is. On this
machine a look costs three `stat` calls per job, and a job is read where they differ from the last time: everything that
matters is written into a run directory by renaming. The function ``read``, which is given, turns a folder into a row;
it must not raise.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dtrain_dagster.jobs.facts import JobFacts
from trainer.config import JOB_ID
from trainer.rundir import EVENTS, STATUS
from trainer.storage.base import Storage, is_litter

READERS = 16
"""The number of run directories on remote storage that are read in parallel."""
MOST_STALE_SECONDS = 15.0
"""The age of a list from which a reader rather waits for the one who looks now."""
SETTLED_SECONDS = 300.0
"""The time between two looks at a job that is damaged, or that has ended on remote storage: it may have been mended, or
started again."""
FRESH_SECONDS = 2.0
"""A time longer than the resolution of any file system's timestamps."""

Mark = tuple[int, ...]
"""Times of writing, in nanoseconds, and sizes of the files and folders that a row is read from."""
Read = Callable[[str], tuple[JobFacts | None, float]]
"""Returns the row of a run directory, None where it is no training, and the seconds for which that stays as it is while
its files keep their marks."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The list of all jobs at one moment, newest first."""

    version: int = 0
    """A number that changes with any of the rows; 0 before the first look."""
    rows: tuple[JobFacts, ...] = ()
    unread: int = 0
    """The number of run directories not read yet: thousands of them take several looks."""


@dataclass(frozen=True, slots=True)
class _Known:
    row: JobFacts | None
    mark: Mark | None
    """None where it was read within `FRESH_SECONDS` of the newest mark: a later write may have had the same time."""
    read_at: float
    keeps_seconds: float


class JobIndex:
    """The index of a storage's jobs. Safe for any number of threads."""

    def __init__(self, storage: Storage, read: Read, every_seconds: float) -> None:
        """A list younger than ``every_seconds`` is new enough."""
        self._storage, self._read, self._every = storage, read, every_seconds
        self._known: dict[str, _Known] = {}
        self._listing = Listing()
        self._done_at = -math.inf
        self._lock = threading.Lock()

    def listing(self, most_seconds: float = math.inf) -> Listing:
        """Return the list as it is now, or as it was lately where another reader looks now. Reading takes about
        ``most_seconds`` at most; the next call goes on with what is left. Raise OSError where storage cannot be
        listed."""
        age = time.monotonic() - self._done_at
        if age < self._every:
            return self._listing
        patience = 0.0 if age < MOST_STALE_SECONDS else min(most_seconds, threading.TIMEOUT_MAX)
        if self._lock.acquire(timeout=patience):
            try:
                if time.monotonic() - self._done_at >= self._every:
                    self._look(time.monotonic() + most_seconds)
            finally:
                self._lock.release()
        return self._listing

    def _look(self, until: float) -> None:
        marks = self._marks()
        for name in self._known.keys() - marks.keys():
            del self._known[name]
        # Should this take long: first the jobs that were never read, the newest of them first, then the oldest rows.
        names = sorted((name for name, mark in marks.items() if self._is_due(name, mark)), key=self._urgency(marks))
        at_once = 1 if self._storage.is_local else READERS
        with ThreadPoolExecutor(at_once) as pool:
            while names and time.monotonic() < until:
                part = [names.pop() for _ in names[:at_once]]
                for name, (row, keeps_seconds) in zip(part, pool.map(self._read, part), strict=True):
                    mark, now = marks[name], time.monotonic()
                    fresh = bool(mark) and abs(time.time() - max(mark[0], mark[1], mark[3]) / 1e9) < FRESH_SECONDS
                    self._known[name] = _Known(row, None if fresh else mark, now, keeps_seconds)
        rows = [known.row for known in self._known.values() if known.row is not None]
        rows.sort(key=lambda row: (row.began_at or 0.0, row.job_id), reverse=True)
        before, unread = self._listing, sum(name not in self._known for name in names)
        if (before.rows, before.unread) != (tuple(rows), unread) or not before.version:
            self._listing = Listing(before.version + 1, tuple(rows), unread)
        if not unread:
            self._done_at = time.monotonic()

    def _urgency(self, marks: dict[str, Mark]) -> Callable[[str], tuple[bool, Mark | tuple[float]]]:
        """Return the key by which run directories are sorted, the most urgent last."""
        known = self._known
        return lambda name: (name not in known, (-known[name].read_at,) if name in known else marks[name])

    def _marks(self) -> dict[str, Mark]:
        """Return every run directory with the mark of its files; on remote storage without marks."""
        if not self._storage.is_local:
            return {name: () for name in self._storage.list() if JOB_ID.fullmatch(name)}
        found: dict[str, Mark] = {}
        try:
            with os.scandir(self._storage.path()) as entries:
                for entry in entries:
                    if JOB_ID.fullmatch(entry.name) and not is_litter(entry.name):
                        inside = (*_mark(f"{entry.path}/{STATUS}"), *_mark(f"{entry.path}/{EVENTS}"))
                        found[entry.name] = (*_mark(entry.path)[:1], *inside)
        except FileNotFoundError:
            return {}
        return found

    def _is_due(self, name: str, mark: Mark) -> bool:
        known = self._known.get(name)
        return known is None or known.mark != mark or time.monotonic() - known.read_at >= known.keeps_seconds


def _mark(path: str) -> Mark:
    """Return (written at, size) of a file or folder; zeros where it cannot be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)

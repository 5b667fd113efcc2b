"""The list of all jobs, kept up to date by looking only at what has changed, for any number of readers.

One thread at a time makes a round over the run directories, when a reader asks and the list is old. On this machine a
round costs two `stat` calls per job, and a job is read where they differ from the last time: everything that matters is
written into a run directory by renaming. The function ``read``, which is given, turns a folder into a row; it must not
raise.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.jobs.facts import JobFacts
from trainer.config import JOB_ID
from trainer.rundir import STATUS
from trainer.storage.base import Storage, is_litter

ENDED = frozenset(state.value for state in JobState if state.is_final)

READERS = 16
"""The number of run directories on remote storage that are read in parallel."""
MOST_STALE_SECONDS = 15.0
"""The greatest age of a list that a reader gets; for a newer one the reader waits."""
PUBLISH_SECONDS = 0.25
"""The interval at which a long round publishes what it has read so far."""
SETTLED_SECONDS = 300.0
"""The time between two looks at a job that is damaged, or that has ended on remote storage: it may have been mended, or
started again."""
FRESH_SECONDS = 2.0
"""A time longer than the resolution of any file system's timestamps."""

Mark = tuple[int, ...]
"""Times of writing, in nanoseconds, and size of the files that a row is read from."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The list of all jobs at one moment, newest first."""

    version: int = 0
    """A number that changes with any of the rows."""
    rows: tuple[JobFacts, ...] = ()
    unread: int = 0
    """The number of run directories not read yet: with thousands of them the first round takes a while."""


@dataclass(slots=True)
class _Known:
    row: JobFacts | None
    """None where the folder is no training."""
    mark: Mark
    read_at: float
    fresh: bool
    """Whether it was read within `FRESH_SECONDS` of the newest mark: a later write may have had the same time."""


def keeps_seconds(row: JobFacts | None, is_local: bool) -> float:
    """Return the seconds for which a row stays valid while its files keep their marks: none for a job that runs, or
    that may still change, since no file tells that a supervisor was killed. Pure."""
    if row is not None and (row.running or row.may_change):
        return 0.0
    return math.inf if is_local and (row is None or not row.status.damage) else SETTLED_SECONDS


class JobIndex:
    """The index of a storage's jobs. Safe for any number of threads."""

    def __init__(self, storage: Storage, read: Callable[[str], JobFacts | None], every_seconds: float) -> None:
        """``read`` returns the row of a run directory; a list younger than ``every_seconds`` is new enough."""
        self._storage, self._read, self._every = storage, read, every_seconds
        self._known: dict[str, _Known] = {}
        self._listing = Listing()
        self._done_at = -math.inf
        self._error: Exception | None = None
        self._round: threading.Thread | None = None
        self._lock = threading.Lock()

    def listing(self, wait_seconds: float | None = None) -> Listing:
        """Return the present list, or the one after the round that this call may start. Where no list is recent, wait
        ``wait_seconds``; None: until the round is over. Raise OSError where storage cannot be listed."""
        with self._lock:
            age = time.monotonic() - self._done_at
            if age < self._every and self._error is None:
                return self._listing
            if self._round is None:
                self._round = threading.Thread(target=self._make_round, name="job-index", daemon=True)
                self._round.start()
            running = self._round
            if age < MOST_STALE_SECONDS:
                return self._listing
        running.join(wait_seconds)
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._listing

    def _make_round(self) -> None:
        try:
            self._look()
            error = None
        except Exception as failed:  # waiting readers get the error; the next reader starts another round
            error = failed
        with self._lock:
            self._error, self._round = error, None
            if error is None:
                self._done_at = time.monotonic()

    def _look(self) -> None:
        marks = self._marks()
        gone = self._known.keys() - marks.keys()
        for name in gone:
            del self._known[name]
        # The newest first: readers look at these, should this take long.
        names = sorted((name for name, mark in marks.items() if self._is_due(name, mark)), key=lambda name: marks[name])
        names.reverse()
        if not names and not gone and self._listing.version:  # the first look tells that there is none
            return
        published = time.monotonic()
        with ThreadPoolExecutor(1 if self._storage.is_local else READERS) as pool:
            for count, (name, row) in enumerate(zip(names, pool.map(self._read, names), strict=True), start=1):
                self._known[name] = self._noted(row, marks[name])
                if time.monotonic() - published > PUBLISH_SECONDS:
                    self._publish(unread=sum(name not in self._known for name in names[count:]))
                    published = time.monotonic()
        self._publish(unread=0)

    def _noted(self, row: JobFacts | None, mark: Mark) -> _Known:
        fresh = bool(mark) and abs(time.time() - max(mark[0], mark[1]) / 1e9) < FRESH_SECONDS
        return _Known(row, mark, time.monotonic(), fresh)

    def _publish(self, unread: int) -> None:
        rows = [known.row for known in self._known.values() if known.row is not None]
        rows.sort(key=lambda row: (row.began_at or 0.0, row.job_id), reverse=True)
        before = self._listing
        if (before.rows, before.unread) != (tuple(rows), unread) or not before.version:
            self._listing = Listing(before.version + 1, tuple(rows), unread)

    def _marks(self) -> dict[str, Mark]:
        """Return every run directory with the mark of its files; on remote storage without marks."""
        if not self._storage.is_local:
            return {name: () for name in self._storage.list() if JOB_ID.fullmatch(name)}
        found: dict[str, Mark] = {}
        try:
            with os.scandir(self._storage.path()) as entries:
                for entry in entries:
                    if JOB_ID.fullmatch(entry.name) and not is_litter(entry.name):
                        found[entry.name] = (*_mark(entry.path)[:1], *_mark(f"{entry.path}/{STATUS}"))
        except FileNotFoundError:
            return {}
        return found

    def _is_due(self, name: str, mark: Mark) -> bool:
        known = self._known.get(name)
        if known is None or known.mark != mark or known.fresh:
            return True
        return time.monotonic() - known.read_at >= keeps_seconds(known.row, self._storage.is_local)


def _mark(path: str) -> Mark:
    """Return (written at, size) of a file or folder; zeros where it cannot be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)

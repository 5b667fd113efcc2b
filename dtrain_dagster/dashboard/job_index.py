"""The list of all jobs, kept up to date by looking only at what has changed; for any number of readers.

One thread at a time makes a round over the run directories, when somebody asks and the list is old. On this machine a
round costs two `stat` calls per job, and a job is read where they differ from the last time: everything that matters
is written into a run directory by renaming. What a job is, is told by the function that is given; it must not raise.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dtrain_dagster.dashboard.job_row import JobRow
from trainer.config import JOB_ID
from trainer.rundir import EVENTS, STATUS
from trainer.storage.base import Storage, is_litter

READERS = 16
"""Run directories on remote storage that are read side by side."""
MOST_STALE_SECONDS = 15.0
"""An older list is given to nobody: who asks waits for the next one."""
PUBLISH_SECONDS = 1.0
"""So often a round that takes long shows what it has read so far."""
SETTLED_SECONDS = 300.0
"""On remote storage, between two looks at a job that has ended: somebody may have started it again."""
QUIET_SHARE, MOST_QUIET_SECONDS = 1 / 20, 600.0
"""A job whose files have not changed for an hour is read every three minutes; see `keeps_seconds`."""
FRESH_SECONDS = 2.0
"""Longer than the steps in which any file system counts time."""
MOST_PAGE = 200

Mark = tuple[int, ...]
"""When what a row is read from was written, in nanoseconds, and its size."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found in a run directory."""

    row: JobRow | None
    """None where it is no training."""
    settled: bool = False
    """The cluster has told its end: nothing changes unless it is started again."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All jobs at one moment, newest first."""

    version: int = 0
    """Another one where anything is different."""
    rows: tuple[JobRow, ...] = ()
    unread: int = 0
    """Run directories that were not read yet: the first round takes a while where there are thousands."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the jobs that were asked for."""

    rows: tuple[JobRow, ...]
    number: int
    """From 0; the last one there is where a later one was asked for."""
    pages: int
    total: int
    """Jobs on all pages."""
    states: dict[str, int]
    """How many of all jobs are in each state."""


@dataclass(slots=True)
class _Known:
    seen: Seen
    mark: Mark
    read_at: float
    fresh: bool
    """It was read within `FRESH_SECONDS` of the newest mark: another write may have had the same time."""


def page_of(rows: Iterable[JobRow], state: str = "", text: str = "", number: int = 0, size: int = 50) -> Page:
    """Jobs in this state (any where it is "") whose id or model has this text in it, in the order given. Pure."""
    rows, wanted, size = tuple(rows), text.casefold(), max(1, min(size, MOST_PAGE))
    found = [
        row
        for row in rows
        if (not state or row.state == state)
        and (not wanted or wanted in row.job_id.casefold() or wanted in row.model.casefold())
    ]
    pages = max(1, math.ceil(len(found) / size))
    number = max(0, min(number, pages - 1))
    states = dict(sorted(Counter(row.state for row in rows).items()))
    return Page(tuple(found[number * size : (number + 1) * size]), number, pages, len(found), states)


def keeps_seconds(seen: Seen, is_local: bool, quiet_seconds: float) -> float:
    """How long a row holds whose files have the same marks as when it was read. Pure.

    Not for ever where the cluster has not told an end: that a supervisor was killed is in no file.
    ``quiet_seconds``: since the newest of them was written; on remote storage nothing is known of that.
    """
    if not is_local:
        return 0.0 if seen.row is not None and not seen.settled else SETTLED_SECONDS
    if seen.settled or seen.row is None:
        return math.inf
    return min(max(0.0, quiet_seconds) * QUIET_SHARE, MOST_QUIET_SECONDS)


class JobIndex:
    """The list of a storage. Any number of threads may ask."""

    def __init__(self, storage: Storage, read: Callable[[str], Seen], every_seconds: float) -> None:
        """``read``: what is in the run directory of that name. A list younger than ``every_seconds`` is new enough."""
        self._storage, self._read, self._every = storage, read, every_seconds
        self._known: dict[str, _Known] = {}
        self._listing = Listing()
        self._done_at = -math.inf
        self._error: Exception | None = None
        self._round: threading.Thread | None = None
        self._lock = threading.Lock()

    def listing(self, wait_seconds: float | None = None) -> Listing:
        """The list as it is, or is after the round that this may start. Waits so long where there is none that is
        recent; None: until the round is over. OSError where storage cannot be listed."""
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

    def mark(self, name: str) -> Mark | None:
        """Of a job that has ended, when that was told: the same as long as it was not started again. None for others,
        and on remote storage."""
        known = self._known.get(name)
        return known.mark if known and known.mark and known.seen.settled else None

    def _make_round(self) -> None:
        try:
            self._look()
            error = None
        except Exception as failed:  # whoever waits is told; the next one who asks starts another round
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
        # The newest first: they are what is looked at, should this take long.
        names = sorted((name for name, mark in marks.items() if self._is_due(name, mark)), key=lambda name: marks[name])
        names.reverse()
        if not names and not gone:
            return
        published = time.monotonic()
        with ThreadPoolExecutor(1 if self._storage.is_local else READERS) as pool:
            for count, (name, seen) in enumerate(zip(names, pool.map(self._read, names), strict=True), start=1):
                self._known[name] = self._noted(seen, marks[name])
                if time.monotonic() - published > PUBLISH_SECONDS:
                    self._publish(unread=sum(name not in self._known for name in names[count:]))
                    published = time.monotonic()
        self._publish(unread=0)

    def _noted(self, seen: Seen, mark: Mark) -> _Known:
        fresh = bool(mark) and abs(time.time() - max(mark[0], mark[1]) / 1e9) < FRESH_SECONDS
        return _Known(seen, mark, time.monotonic(), fresh)

    def _publish(self, unread: int) -> None:
        rows = [known.seen.row for known in self._known.values() if known.seen.row is not None]
        rows.sort(key=lambda row: (row.started_at or 0.0, row.job_id), reverse=True)
        before = self._listing
        if (before.rows, before.unread) != (tuple(rows), unread) or not before.version:
            self._listing = Listing(before.version + 1, tuple(rows), unread)

    def _marks(self) -> dict[str, Mark]:
        """Every run directory, with the mark of what is in it; without where storage is remote."""
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
        quiet = 0.0
        if mark and not known.seen.settled and known.seen.row is not None:
            newest = max(mark[0], mark[1], *_mark(self._storage.path(f"{name}/{EVENTS}"))[:1])
            quiet = time.time() - newest / 1e9
        return time.monotonic() - known.read_at >= keeps_seconds(known.seen, self._storage.is_local, quiet)


def _mark(path: str) -> Mark:
    """(written at, size) of a file or folder; zeros where there is none that can be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)

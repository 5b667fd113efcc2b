"""The figures of all jobs, read behind the list: it is shown at once, and they follow, those of the newest jobs first.

One thread at a time reads, when a reader asks and something is due. A job that has ended is read once; a running one
again and again. The function ``read``, which is given, must not raise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dtrain_dagster.dashboard.job_figures import JobFigures
from dtrain_dagster.dashboard.job_index import JobRow

READERS = 16
"""The number of run directories on remote storage that are read in parallel."""
SETTLING_SECONDS, SETTLING_EVERY_SECONDS = 900.0, 30.0
"""The time after a job's end in which its report may still come, and the time between two looks for it."""
READING_SHARE = 0.1
"""The greatest share of time that is spent on reading one running job."""

Read = Callable[[JobRow, JobFigures | None], JobFigures]


@dataclass(frozen=True, slots=True)
class KnownFigures:
    """A job's figures, as they were read."""

    row: JobRow
    """The row that they were read for."""
    figures: JobFigures
    read_at: float
    """When the reading ended, by `time.monotonic`, and how long it took in seconds."""
    took_seconds: float


def is_due(row: JobRow, known: KnownFigures | None, age_seconds: float, ended_seconds: float, every: float) -> bool:
    """Return whether a job's figures must be read. Pure.

    A row that has changed says that its run directory has. A running job's dollars grow without that, and the report on
    a job is written after its end. ``age_seconds``: since they were read. ``ended_seconds``: since the job has ended.
    ``every``: the least seconds between two looks.
    """
    if known is None or (known.row != row and not row.running):
        return True
    if not row.running and ended_seconds > SETTLING_SECONDS and not known.figures.is_failed:
        return False
    return age_seconds >= max(every if row.running else SETTLING_EVERY_SECONDS, known.took_seconds / READING_SHARE)


class FiguresIndex:
    """The index of the jobs' figures. Safe for any number of threads."""

    def __init__(self, read: Read, every_seconds: float, is_local: bool = True) -> None:
        """``every_seconds``: the least time between two looks at a running job."""
        self._read, self._every, self._is_local = read, every_seconds, is_local
        self._known: dict[str, KnownFigures] = {}
        self._reading: threading.Thread | None = None
        self._lock = threading.Lock()
        self.version = 0
        """A number that changes with any of the figures."""

    def look(self, rows: Sequence[JobRow], are_all: bool = True) -> Mapping[str, KnownFigures]:
        """Return what is known of these jobs, and begin to read what is due. ``are_all``: False while the list itself
        is being read, which comes first."""
        with self._lock:
            if self._reading is None and are_all:
                due = [row for row in rows if self._is_due(row)]
                gone = self._known.keys() - {row.job_id for row in rows}
                for job_id in gone:
                    del self._known[job_id]
                self.version += bool(gone)
                if due:
                    due.sort(key=lambda row: not row.running)  # else in their order, newest first
                    self._reading = threading.Thread(target=self._read_all, args=(due,), name="figures", daemon=True)
                    self._reading.start()
            return dict(self._known)

    def wait(self) -> None:
        """Wait until what is being read was read."""
        reading = self._reading
        if reading is not None:
            reading.join()

    def _is_due(self, row: JobRow) -> bool:
        known = self._known.get(row.job_id)
        age = time.monotonic() - known.read_at if known else 0.0
        return is_due(row, known, age, time.time() - (row.ended_at or 0.0), self._every)

    def _read_all(self, due: Sequence[JobRow]) -> None:
        try:
            with ThreadPoolExecutor(1 if self._is_local else READERS) as pool:
                for known in pool.map(self._read_one, due):
                    with self._lock:
                        self._known[known.row.job_id] = known
                        self.version += 1
        finally:
            with self._lock:
                self._reading = None

    def _read_one(self, row: JobRow) -> KnownFigures:
        before, began = self._known.get(row.job_id), time.monotonic()
        figures = self._read(row, before.figures if before else None)
        ended = time.monotonic()
        return KnownFigures(row, figures, ended, ended - began)

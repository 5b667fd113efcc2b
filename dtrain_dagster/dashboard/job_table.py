"""The table of all jobs: what each row says, and what of it is new to a reader.

A page has the whole table and sorts, filters and folds it by itself; it asks for the rows that have changed since it
asked last. Answers are encoded once for all pages that ask for the same.
"""

from __future__ import annotations

import gzip
import json
import math
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from dtrain_dagster.clusters.notice_text import UNTOLD
from dtrain_dagster.dashboard.answers import answer_json, encode, read_number, tell_error
from dtrain_dagster.dashboard.job_board import JobBoard, refresh_seconds
from dtrain_dagster.dashboard.job_figures import JobFigures, read_figures
from dtrain_dagster.dashboard.job_groups import FleetGroups, JobGroup, group_of
from dtrain_dagster.dashboard.job_index import DAMAGED, JobRow, Listing
from dtrain_dagster.dashboard.page import data_block, static
from trainer.rundir import RunDir

READERS = 16
"""The number of run directories on remote storage that are read in parallel."""
SETTLING_SECONDS, SETTLING_EVERY_SECONDS = 900.0, 30.0
"""The time after a job's end in which its report may still come, and the time between two looks for it."""
READING_SHARE = 0.1
"""The greatest share of time that is spent on reading one running job."""

Read = Callable[[JobRow, JobFigures | None], JobFigures]
MOST_ANSWERS = 32
"""The most encoded answers that are kept."""
MOST_GONE = 2000
"""The most deleted jobs that are remembered; a page that has missed one more gets the whole table again."""
SHOWN_SECONDS = 30.0
"""How long a job's page counts as open after it has asked for the job's figures; it asks every few seconds."""
EVERY_SECONDS = 1.0
"""The least time between two looks at what has changed."""


def table_row(row: JobRow, figures: JobFigures | None, fleets: Mapping[str, JobGroup]) -> dict[str, Any]:
    """Return what a row of the table says, without what is not known. Pure.

    Times are Unix seconds; ``seconds`` is how long an ended job took over all launches. Without ``figures`` they are
    not read yet, and ``unread`` says so. ``fleets``: the groups of the jobs of fleets and searches.
    """
    ended = row.ended_at is not None and row.started_at is not None
    took = row.seconds if row.seconds is not None else row.ended_at - row.started_at if ended else None  # type: ignore[operator]
    found = figures or JobFigures()
    # A probe's model is for no one, so its gate is no news.
    gate = "" if row.job_id.startswith(UNTOLD) else {True: "passed", False: "not passed", None: ""}[found.is_passed]
    group = group_of(row.job_id, fleets)
    says = {
        "id": row.job_id,
        "state": row.state,
        "live": row.running or None,
        "verdict": found.verdict.words or (row.reason if row.state == DAMAGED else ""),
        "tone": found.verdict.tone,
        "step": row.step,
        "of": found.total_steps,
        "score": _rounded(found.score),
        "metric": found.metric,
        "gate": gate,
        "nodes": found.node_count,
        "valid": _rounded(found.valid_loss),
        "usd": _rounded(found.usd),
        "end": _rounded(found.usd_at_end),
        "price": found.price_words,
        "started": _rounded(row.started_at, 3),
        "seconds": None if took is None else round(max(0.0, took), 1),
        "model": row.model,
        "group": group and [group.key, group.kind, group.name, group.label],
        "unread": True if figures is None and row.state != DAMAGED else None,
    }
    return {name: value for name, value in says.items() if value not in (None, "")}


def _rounded(value: float | None, digits: int = 6) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


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
    """The figures of all jobs, read behind the list: it is shown at once, and they follow, those of the newest jobs
    first. Safe for any number of threads.

    One thread at a time reads, when a reader asks and something is due. A job that has ended is read once; a running
    one again and again. The function ``read``, which is given, must not raise.
    """

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


class JobTable:
    """The table of a board's jobs, for any number of pages and threads. ``home``: where fleets are; None: there are
    none."""

    def __init__(self, board: JobBoard, home: Path | None) -> None:
        self._board, self._fleets = board, FleetGroups(home)
        every = 2 * refresh_seconds(board.storage)
        self._figures = FiguresIndex(self._read, every, board.storage.is_local)
        self._token = uuid.uuid4().hex[:8]
        self._version = 0
        self._rows: dict[str, tuple[dict[str, Any], int]] = {}
        """What each row says, and the version in which it came to say so."""
        self._gone: deque[tuple[int, str]] = deque(maxlen=MOST_GONE)
        self._seen: tuple[Listing | None, int] = (None, -1)
        self._looked_at = -1e9
        self._answers: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, token: str, since: int, wait_seconds: float | None) -> bytes:
        """Return the rows that are new to a page that has those of version ``since`` under this token, as JSON; all
        rows where it has none. Raise OSError where storage cannot be listed."""
        listing = self._board.listing(wait_seconds)
        with self._lock:
            self._update(listing)
            forgotten = len(self._gone) == MOST_GONE and self._gone[0][0] > since
            since = since if token == self._token and since <= self._version and not forgotten else 0
            unread = listing.unread if listing.version else max(1, listing.unread)  # else none was looked for yet
            asked = (self._version, since, unread)
            if asked not in self._answers:
                self._answers[asked] = self._encoded(since, unread)
            self._answers.move_to_end(asked)
            while len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)
            return self._answers[asked]

    def wait(self) -> None:
        """Wait until the figures that are being read were read."""
        self._figures.wait()
        self._looked_at = -1e9

    def _update(self, listing: Listing) -> None:
        """Note which rows say something else than before."""
        now = time.monotonic()
        if listing is self._seen[0] and now - self._looked_at < EVERY_SECONDS:
            return
        known, version = self._figures.look(listing.rows, not listing.unread), self._figures.version
        self._looked_at = now
        if (listing, version) == self._seen:
            return
        self._seen = (listing, version)
        self._take(listing, known)

    def _take(self, listing: Listing, known: Mapping[str, KnownFigures]) -> None:
        number, changed, fleets = self._version + 1, False, self._fleets.read()
        there = set()
        for row in listing.rows:
            there.add(row.job_id)
            figures = known.get(row.job_id)
            says = table_row(row, figures.figures if figures else None, fleets)
            before = self._rows.get(row.job_id)
            if before is None or before[0] != says:
                self._rows[row.job_id], changed = (says, number), True
        for job_id in self._rows.keys() - there:
            del self._rows[job_id]
            self._gone.append((number, job_id))
            changed = True
        if changed or not self._version:
            self._version = number

    def _encoded(self, since: int, unread: int) -> bytes:
        answer: dict[str, Any] = {
            "token": self._token,
            "version": self._version,
            "whole": since == 0,
            "rows": [says for says, version in self._rows.values() if version > since],
            "gone": [name for at, name in self._gone if 0 < since < at and name not in self._rows],
            "unread": unread,
        }
        return encode(answer)

    def _read(self, row: JobRow, before: JobFigures | None) -> JobFigures:
        rundir = RunDir(f"{self._board.jobs_uri}/{row.job_id}")
        opened = self._board.opened(row.job_id)
        # A page that was closed leaves its verdict as it was.
        is_shown = opened is not None and time.monotonic() - opened.shown_at < SHOWN_SECONDS
        shown = opened.dashboard.live_verdict if opened is not None and is_shown else None
        return read_figures(rundir, row, self._board.tier, time.time(), before, shown)


TABLE_WAIT_SECONDS = 0.4
"""The longest wait of the table's page, which shows what was read until then and soon asks for the rest."""
MOST_WITHIN_BYTES = 2**20
"""The largest table that is sent within its page; a larger one is asked for by the page, which shows itself first."""
MOST_TOKEN = 64
FILES = {
    "jobs.js": "text/javascript",
    "table_state.js": "text/javascript",
    "jobs.css": "text/css",
}
"""The files of these pages, besides those that all pages share."""


def table_routes(board: JobBoard, home: Path | None) -> list[Route]:
    """Return the routes of the pages and their figures. ``home``: where fleets are; None: there are none."""
    table = JobTable(board, home)
    with suppress(OSError):  # who looks first waits less
        board.listing(wait_seconds=0.0)

    def page(request: Request) -> Response:
        with suppress(OSError):  # the page asks again, and tells of it
            known = table.answer("", 0, wait_seconds=0.0)
            if len(known) <= MOST_WITHIN_BYTES:
                return _html(request, data_block("table-data", json.loads(known)))
        return _html(request, "")

    def rows(request: Request) -> Response:
        asked = request.query_params
        try:
            token, since = asked.get("token", "")[:MOST_TOKEN], read_number(asked.get("since", ""))
            body = table.answer(token, since, TABLE_WAIT_SECONDS)
        except OSError as error:
            return tell_error(f"the jobs cannot be listed: {type(error).__name__}: {error}")
        return answer_json(request, body, None)

    return [
        Route("/", page),
        Route("/table.json", rows),
        *(Route(f"/{name}", _file(name)) for name in FILES),
    ]


def _html(request: Request, data: str) -> Response:
    """Return the page of the table with what is known of it already: its rows are drawn without another question."""
    body = Template(static("jobs.html")).substitute(data=data).encode()
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return HTMLResponse(body)
    return HTMLResponse(gzip.compress(body, 1), headers={"content-encoding": "gzip", "vary": "accept-encoding"})


def _file(name: str) -> Callable[[Request], Response]:
    def file(request: Request) -> Response:
        return Response(static(name), media_type=FILES[name])

    return file

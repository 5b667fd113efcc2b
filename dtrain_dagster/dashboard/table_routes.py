"""The routes of the table of all jobs, which is the first page, and of the overlay of some of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from dtrain_dagster.dashboard.answers import answer_json, encode, read_number, tell_error
from dtrain_dagster.dashboard.job_board import CANNOT_READ, JobBoard
from dtrain_dagster.dashboard.job_table import JobTable
from dtrain_dagster.dashboard.overlay import LEAST_RUNS, MOST_RUNS, overlay
from dtrain_dagster.dashboard.page import static

LIST_WAIT_SECONDS = 2.0
"""The longest wait of a page for the list to be read; then it shows what was read until then."""
MOST_TOKEN = 64
FILES = {
    "theme.js": "text/javascript",
    "common.js": "text/javascript",
    "jobs.js": "text/javascript",
    "table_state.js": "text/javascript",
    "overlay.js": "text/javascript",
    "jobs.css": "text/css",
}
"""The files of these pages, besides those that all pages share."""


def table_routes(board: JobBoard, home: Path | None) -> list[Route]:
    """Return the routes of the pages and their figures. ``home``: where fleets are; None: there are none."""
    table = JobTable(board, home)

    def page(request: Request) -> Response:
        return HTMLResponse(static("jobs.html"))

    def overlay_page(request: Request) -> Response:
        return HTMLResponse(static("overlay.html"))

    def rows(request: Request) -> Response:
        asked = request.query_params
        try:
            token, since = asked.get("token", "")[:MOST_TOKEN], read_number(asked.get("since", ""))
            body = table.answer(token, since, LIST_WAIT_SECONDS)
        except OSError as error:
            return tell_error(f"the jobs cannot be listed: {type(error).__name__}: {error}")
        return answer_json(request, body, None)

    def runs(request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("job")))
        if not LEAST_RUNS <= len(names) <= MOST_RUNS:
            return PlainTextResponse(f"an overlay has {LEAST_RUNS} to {MOST_RUNS} jobs, and not {len(names)}", 400)
        now, found = time.time(), []
        for name in names:
            try:
                job = board.open(name, now)
                while job is not None and job.is_behind:
                    job.read_more()
            except CANNOT_READ as error:
                return tell_error(f"the run directory of {name} cannot be read: {type(error).__name__}: {error}")
            if job is None:
                return PlainTextResponse(f"there is no job {name!r}".encode(errors="replace"), 404)
            found.append(job)
        try:
            return answer_json(request, encode(overlay(found, board.tier)), None)
        except CANNOT_READ as error:
            return tell_error(f"the runs cannot be read: {type(error).__name__}: {error}")

    return [
        Route("/", page),
        Route("/table.json", rows),
        Route("/overlay", overlay_page),
        Route("/overlay.json", runs),
        *(Route(f"/{name}", _file(name)) for name in FILES),
    ]


def _file(name: str) -> Callable[[Request], Response]:
    def file(request: Request) -> Response:
        return Response(static(name), media_type=FILES[name])

    return file

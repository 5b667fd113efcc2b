"""The routes of the table of all jobs, which is the first page."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from string import Template

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from dtrain_dagster.dashboard.answers import answer_json, read_number, tell_error
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_table import JobTable
from dtrain_dagster.dashboard.page import data_block, static

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

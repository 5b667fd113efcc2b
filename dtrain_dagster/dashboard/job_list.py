"""The page of all jobs: a table that the server makes, live ones first, of the jobs that its address asks for.

A page asks for itself every two seconds, and takes over the rows where they have changed. Who sorts or compares jobs
does that in MLflow.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, lru_cache
from urllib.parse import quote, urlencode

import jinja2
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dtrain_dagster.dashboard.answers import read_number, refuse, respond
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_index import Listing
from dtrain_dagster.dashboard.page import static
from dtrain_dagster.jobs.facts import DAMAGED, JobFacts
from dtrain_dagster.support.formatting import dollars, format_duration

ROWS = 100
"""The rows of a page, until more are asked for."""
MOST_TEXT = 200
STATES = ("running", "queued", "failed", DAMAGED, "cancelled", "succeeded")
WAIT_SECONDS = 0.4
"""The longest wait for jobs that were never read; the page shows those that were, and soon asks again."""


def jobs_page(dashboard_url: str, text: str) -> str:
    """Return the address of the list of the jobs that have this text in their names, such as that of their fleet. Pure.
    It is no query: the guard refuses those in links from pages of other servers."""
    return f"{dashboard_url.rstrip('/')}/find/{quote(text, safe='')}"


def chosen(rows: Sequence[JobFacts], text: str, state: str) -> list[JobFacts]:
    """Return the rows in ``state`` ("" for any) that have all words of a text, those of live jobs first. Pure."""
    words = text.lower().split()
    found = [
        row
        for row in rows
        if state in ("", row.state) and all(word in f"{row.job_id} {row.model} {row.words}".lower() for word in words)
    ]
    return sorted(found, key=lambda row: not row.running)


def list_page(listing: Listing, text: str, state: str, most: int) -> str:
    """Return the page. ``most``: how many rows it has at most. Pure."""
    found = chosen(listing.rows, text, state)
    usd = [row.usd for row in found if row.usd is not None]
    return _template().render(
        rows=found[:most],
        found=len(found),
        paid=dollars(sum(usd)) if usd else "",
        text=text,
        state=state,
        states=STATES,
        running=sum(row.running for row in listing.rows),
        unread=listing.unread if listing.version else max(1, listing.unread),  # else none was looked for yet
        total=len(listing.rows),
        more=f"/?{urlencode({'q': text, 'state': state, 'n': most + ROWS})}" if len(found) > most else "",
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"dollars": dollars, "moment": _moment, "took": format_duration, "many": "{:,}".format}
    return environment.from_string(static("jobs.html"))


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def list_routes(board: JobBoard) -> list[Route]:
    """Return the routes of the page."""
    with suppress(OSError):  # who looks first waits less
        board.listing(wait_seconds=0.0)

    @lru_cache(maxsize=32)
    def made(version: int, second: int, text: str, state: str, most: int) -> tuple[bytes, str]:
        """Return the page and its tag, made once for all browsers that ask for the same within a second."""
        body = list_page(board.listing(0.0), text, state, most).encode(errors="replace")
        return body, f'"{hashlib.sha256(body).hexdigest()[:20]}"'

    def page(request: Request) -> Response:
        asked = request.query_params
        text = request.path_params.get("text", asked.get("q", ""))[:MOST_TEXT]
        state = asked.get("state", "") if asked.get("state", "") in STATES else ""
        try:
            version = board.listing(WAIT_SECONDS).version
            most = max(ROWS, read_number(asked.get("n", "")))
            body, tag = made(version, int(time.monotonic()), text, state, most)
        except OSError as error:
            return refuse(f"the jobs cannot be listed: {type(error).__name__}: {error}", 500)
        return respond(request, body, tag, "text/html")

    return [Route("/", page), Route("/find/{text}", page)]

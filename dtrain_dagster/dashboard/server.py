"""The live dashboard's server: its pages, their figures as JSON, and ``/metrics``. It reads, and changes nothing but by
the orders that a job's page gives (`dashboard.orders`).

It is meant for this machine: it listens on loopback, answers only to the names it knows (a foreign site that resolves
its own name to 127.0.0.1 gets nothing), and lets no other site read its answers. Many pages may ask every two seconds:
a shared answer is made once, and a browser that has it already gets "not modified".
"""

from __future__ import annotations

import gzip
import threading
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from functools import cache

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dtrain_dagster.dashboard import page, prometheus
from dtrain_dagster.dashboard.answers import answer_json, encode, read_number, tell_error
from dtrain_dagster.dashboard.fleets import FleetBoard, fleet_routes
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_index import Listing, page_of
from dtrain_dagster.dashboard.job_routes import JobServices, job_routes
from dtrain_dagster.dashboard.table_routes import table_routes
from dtrain_dagster.web.guard import Guard, rules_for

LIST_WAIT_SECONDS = 2.0
"""The longest wait of a page for the list to be read; then it shows what was read until then."""
PAGE_SIZE = 50
MOST_TEXT = 200
MOST_LISTS = 64
"""The most pages of the list that are kept in their encoded form."""
CHUNK_BYTES = 64 * 2**10
HEADERS = {
    "content-security-policy": page.LIVE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def build_app(
    board: JobBoard,
    hosts: Sequence[str] = (),
    fleets: FleetBoard | None = None,
    services: JobServices = JobServices(),  # noqa: B008 - it is frozen
) -> Starlette:
    """Return the web application, with its guard. ``hosts``: names that it answers to, besides loopback's. ``fleets``:
    those that have a page; None: there is no such page. ``services``: what a job's page offers."""
    lists = Lists()

    def script(request: Request) -> Response:
        return Response(page.static(request.url.path[1:]), media_type="text/javascript")

    def style(request: Request) -> Response:
        return Response(page.static(request.url.path[1:]), media_type="text/css")

    def plotly(request: Request) -> Response:
        takes = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"cache-control": "max-age=86400", "vary": "accept-encoding"}
        headers |= {"content-encoding": "gzip"} if takes else {}
        # In pieces, as fast as the browser takes them: whole, it would wait in memory for each slow one.
        return StreamingResponse(_pieces(_plotly(takes)), media_type="text/javascript", headers=headers)

    def jobs(request: Request) -> Response:
        try:
            listing = board.listing(LIST_WAIT_SECONDS)
        except OSError as error:
            return tell_error(f"the jobs cannot be listed: {type(error).__name__}: {error}")
        asked = request.query_params
        state, text = asked.get("state", "")[:MOST_TEXT], asked.get("text", "")[:MOST_TEXT]
        body, tag = lists.get(listing, state, text, read_number(asked.get("page", "")))
        return answer_json(request, body, tag)

    def metrics(request: Request) -> Response:
        return Response(prometheus.exposition(board), media_type=prometheus.CONTENT_TYPE)

    scripts = (*page.SCRIPTS, *page.LIVE_SCRIPTS, page.LAST_SCRIPT)
    rules = rules_for("127.0.0.1", hosts, json_only=True)
    return Starlette(
        routes=[
            *table_routes(board, fleets.home if fleets else None),
            *(Route(f"/{name}", script) for name in scripts),
            *(Route(f"/{name}", style) for name in page.STYLES),
            Route("/plotly.js", plotly),
            Route("/jobs.json", jobs),
            *job_routes(board, services),
            Route("/metrics", metrics),
            *(fleet_routes(fleets) if fleets else []),
        ],
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(Guard, rules=rules),
        ],
    )


class Lists:
    """A cache of encoded pages of the list, each made once for all browsers that ask for it."""

    def __init__(self, kept: int = MOST_LISTS) -> None:
        self._made: OrderedDict[tuple[str, str, int], tuple[Listing, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._kept = kept

    def get(self, listing: Listing, state: str, text: str, number: int) -> tuple[bytes, str]:
        """Return the body, and a tag that is the same as long as the body is."""
        asked = (state, text, number)
        with self._lock:
            made = self._made.get(asked)
            if made is None or made[0] is not listing:
                made = self._made[asked] = (listing, encode(_list(listing, state, text, number)))
            self._made.move_to_end(asked)
            while len(self._made) > self._kept:
                self._made.popitem(last=False)
        return made[1], f'"{zlib.crc32(made[1]):08x}-{len(made[1])}"'


def _list(listing: Listing, state: str, text: str, number: int) -> dict[str, object]:
    found = page_of(listing.rows, state, text, number, PAGE_SIZE)
    return {
        "jobs": [asdict(row) for row in found.rows],
        "page": found.number,
        "pages": found.pages,
        "first": found.number * PAGE_SIZE,
        "total": found.total,
        "states": found.states,
        "unread": listing.unread,
    }


@cache
def _plotly(compressed: bool) -> bytes:
    whole = page.plotly_js().encode()
    return gzip.compress(whole, 6) if compressed else whole


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), CHUNK_BYTES):
        yield data[at : at + CHUNK_BYTES]


class SecurityHeaders:
    """Middleware that puts `HEADERS` on every answer, refusals included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in own if pair[0] not in given)]
            await send(message)

        await self.app(scope, receive, with_headers)

"""The live dashboard's server: its pages, their figures as JSON, and ``/metrics``. It reads, and changes nothing but by
the orders that a job's page gives (`dashboard.orders`).

It is meant for this machine: it listens on loopback, answers only to the names it knows (a foreign site that resolves
its own name to 127.0.0.1 gets nothing), and lets no other site read its answers. Many pages may ask every two seconds:
a shared answer is made once, and a browser that has it already gets "not modified".
"""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dtrain_dagster.dashboard import page, prometheus
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_routes import JobServices, job_routes
from dtrain_dagster.dashboard.job_table import table_routes
from dtrain_dagster.web.guard import Guard, rules_for

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
    home: Path | None = None,
    services: JobServices = JobServices(),  # noqa: B008 - it is frozen
) -> Starlette:
    """Return the web application, with its guard. ``hosts``: names that it answers to, besides loopback's. ``home``:
    where fleets are, whose jobs are one row; None: there are none. ``services``: what a job's page offers."""

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

    def metrics(request: Request) -> Response:
        return Response(prometheus.exposition(board), media_type=prometheus.CONTENT_TYPE)

    scripts = (*page.SCRIPTS, *page.LIVE_SCRIPTS, page.LAST_SCRIPT)
    rules = rules_for("127.0.0.1", hosts, json_only=True)
    return Starlette(
        routes=[
            *table_routes(board, home),
            *(Route(f"/{name}", script) for name in scripts),
            *(Route(f"/{name}", style) for name in page.STYLES),
            Route("/plotly.js", plotly),
            *job_routes(board, services),
            Route("/metrics", metrics),
        ],
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(Guard, rules=rules),
        ],
    )


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

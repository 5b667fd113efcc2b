"""The live dashboard: one page, its figures as JSON, and ``/metrics``. It reads, and changes nothing.

It is meant for this machine: it listens on loopback, answers only to the names it knows (a foreign site that resolves
its own name to 127.0.0.1 gets nothing), and lets no other site read its answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dtrain_dagster.monitoring import page, prometheus
from dtrain_dagster.monitoring.job_board import CANNOT_READ, JobBoard

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
HEADERS = {
    "content-security-policy": page.LIVE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def build_app(board: JobBoard, hosts: Sequence[str] = ()) -> Starlette:
    """The web application. ``hosts``: names that it answers to, besides loopback's."""

    def index(request: Request) -> Response:
        return HTMLResponse(page.live_page())

    def script(request: Request) -> Response:
        return Response(page.static("dashboard.js"), media_type="text/javascript")

    def style(request: Request) -> Response:
        return Response(page.static("dashboard.css"), media_type="text/css")

    def plotly(request: Request) -> Response:
        return Response(page.plotly_js(), media_type="text/javascript", headers={"cache-control": "max-age=86400"})

    def jobs(request: Request) -> Response:
        return JSONResponse({"jobs": [asdict(row) for row in board.jobs()]})

    def job(request: Request) -> Response:
        now = time.time()
        try:
            found = board.open(request.path_params["job_id"], now)
        except CANNOT_READ as error:
            return PlainTextResponse(f"its run directory cannot be read: {type(error).__name__}: {error}", 500)
        if found is None:
            return PlainTextResponse("there is no job of that name", 404)
        since = request.query_params.get("since", "0")
        version = int(since) if since.isascii() and since.isdigit() else 0
        return JSONResponse(found.snapshot(version, request.query_params.get("token", ""), now))

    def metrics(request: Request) -> Response:
        return Response(prometheus.exposition(board), media_type=prometheus.CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/dashboard.js", script),
            Route("/dashboard.css", style),
            Route("/plotly.js", plotly),
            Route("/jobs.json", jobs),
            Route("/jobs/{job_id}.json", job),
            Route("/metrics", metrics),
        ],
        middleware=[
            Middleware(SecurityHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, *hosts], www_redirect=False),
        ],
    )


class SecurityHeaders:
    """Puts `HEADERS` on every answer, refusals included."""

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

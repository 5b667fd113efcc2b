"""The live dashboard's server: the list of jobs, the page of one job (``/jobs/<job id>``) with what it asks for, and
``/metrics``. It reads, and changes nothing but by the orders that a job's page gives (`dashboard.orders`).

It is meant for this machine: it listens on loopback, answers only to the names it knows (a foreign site that resolves
its own name to 127.0.0.1 gets nothing), and lets no other site read its answers.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as METRICS_TYPE
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.supervision.engine import EngineUnreachableError
from dtrain_dagster.dashboard import page
from dtrain_dagster.dashboard.job_board import CANNOT_READ, JobBoard, OpenJob
from dtrain_dagster.dashboard.job_facts import NOWHERE, Places
from dtrain_dagster.dashboard.job_list import ROWS, STATES, list_page
from dtrain_dagster.dashboard.log_pages import LogSource
from dtrain_dagster.dashboard.metrics import exposition
from dtrain_dagster.dashboard.orders import OrderDesk, OrderRefusedError, judge_order
from dtrain_dagster.support.audit import AuditError
from dtrain_dagster.web import guard
from dtrain_dagster.web.guard import Guard, rules_for
from dtrain_dagster.web.peer import is_peer_allowed
from trainer.secrets.redaction import redact

HEADERS = guard.HEADERS | {
    "content-security-policy": page.LIVE_POLICY,
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
COMPRESSED_BYTES = 16 * 2**10
"""The least size of an answer that is compressed."""
LIST_SECONDS = 1.0
"""The time for which a page may read jobs that were never read; it shows what there is, and soon asks again."""
MOST_TEXT = 200
NO_LOGS = "the logs of this job are not on this machine: `dtrain logs` asks its cluster for them"
NO_ORDERS = "this dashboard does not take orders"


def build_app(
    board: JobBoard,
    hosts: Sequence[str] = (),
    places: Places = NOWHERE,
    logs: LogSource | None = None,
    desk: OrderDesk | None = None,
) -> Starlette:
    """Return the web application, with its guard. ``hosts``: names that it answers to, besides loopback's. ``places``:
    pages of other programs; ``logs``: None, and logs are not shown; ``desk``: None, and pages give no orders."""

    def metrics(request: Request) -> Response:
        return Response(exposition(board), media_type=METRICS_TYPE)

    rules = rules_for("127.0.0.1", hosts, json_only=True, headers=HEADERS)
    compression = Middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES, compresslevel=1)

    def plotly(request: Request) -> Response:
        return FileResponse(page.find_plotly_js(), headers={"cache-control": "max-age=86400"})

    static = StaticFiles(directory=page.STATIC)

    async def file(request: Request) -> Response:
        return await static.get_response(request.url.path[1:], request.scope)

    routes = [*list_routes(board), *job_routes(board, places, logs, desk), Route("/metrics", metrics)]
    files = [Route("/plotly.js", plotly), Route("/{name}.js", file), Route("/{name}.css", file)]  # no page's template
    return Starlette(routes=[*routes, *files], middleware=[Middleware(Guard, rules=rules), compression])


def list_routes(board: JobBoard) -> list[Route]:
    """Return the routes of the list."""

    @lru_cache(maxsize=32)
    def made(version: int, second: int, text: str, state: str, most: int) -> tuple[bytes, str]:
        """Return the page and its tag, made once for all browsers that ask for the same within a second."""
        body = list_page(board.listing(0.0), text, state, most).encode(errors="replace")
        return body, f'"{hashlib.sha256(body).hexdigest()[:20]}"'

    def answer(request: Request) -> Response:
        asked = request.query_params
        text = request.path_params.get("text", asked.get("q", ""))[:MOST_TEXT]
        state = asked.get("state", "") if asked.get("state", "") in STATES else ""
        try:
            version = board.listing(LIST_SECONDS).version
            most = max(ROWS, _read_number(asked.get("n", "")))
            body, tag = made(version, int(time.monotonic()), text, state, most)
        except OSError as error:
            return _refuse(f"the jobs cannot be listed: {type(error).__name__}: {error}", 500)
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return HTMLResponse(body, headers={"etag": tag})

    return [Route("/", answer), Route("/find/{text}", answer)]


def job_routes(board: JobBoard, places: Places, source: LogSource | None, desk: OrderDesk | None) -> list[Route]:
    """Return the routes of a job's page: figures, facts, costs, logs, orders."""

    def of_job(answer: Callable[[Request, OpenJob], Response]) -> Callable[[Request], Response]:
        """Return an endpoint that answers from an open job, and in words where it cannot."""

        def endpoint(request: Request) -> Response:
            try:
                found = board.open(request.path_params["job_id"], time.time())
                if found is None:
                    return _refuse("there is no job of that name", 404)
                return answer(request, found)
            except (ClusterError, EngineUnreachableError) as error:
                return _refuse(str(error), 500)
            except CANNOT_READ as error:
                return _refuse(f"its run directory cannot be read: {type(error).__name__}: {error}", 500)

        return endpoint

    def job_page(request: Request) -> Response:
        return HTMLResponse(page.live_job_page(gives_orders=desk is not None))

    def figures(request: Request, found: OpenJob) -> Response:
        asked = request.query_params
        return _json(found.snapshot(_read_number(asked.get("since", "")), asked.get("token", ""), time.time()))

    def facts(request: Request, found: OpenJob) -> Response:
        return _json(found.facts(places))

    def account(request: Request, found: OpenJob) -> Response:
        return _json(asdict(found.account(time.time())))

    def logs(request: Request, found: OpenJob) -> Response:
        if source is None:
            return _refuse(NO_LOGS, 404)
        asked = request.query_params.get("node")
        node = _read_number(asked) if asked else None
        return _json(asdict(source.page(found.row.job_id, node)))

    def orders(request: Request, found: OpenJob) -> Response:
        if desk is None:
            return _refuse(NO_ORDERS, 404)
        return _json(desk.describe(found.row.job_id, found.row.state))

    async def give_order(request: Request) -> Response:
        if desk is None:
            return _refuse(NO_ORDERS, 404)
        is_own = is_own_user(request.scope.get("client"), request.scope.get("server"))
        if refused := judge_order(request.url.hostname or "", is_own):
            return _refuse(refused, 403)
        try:
            asked = json.loads(await request.body())
        except (ValueError, RecursionError):
            asked = {}
        order = str(asked.get("order", "")) if isinstance(asked, dict) else ""

        def answer(request: Request, found: OpenJob) -> Response:
            try:
                state = desk.give(found.rundir, found.row.job_id, found.row.state, order)
            except (OrderRefusedError, AuditError) as error:
                return _refuse(str(error), 409)
            return _json(asdict(state), 202)

        return await run_in_threadpool(of_job(answer), request)

    return [
        Route("/jobs/{job_id}.json", of_job(figures)),
        Route("/jobs/{job_id}/facts.json", of_job(facts)),
        Route("/jobs/{job_id}/account.json", of_job(account)),
        Route("/jobs/{job_id}/logs.json", of_job(logs)),
        Route("/jobs/{job_id}/orders.json", of_job(orders)),
        Route("/jobs/{job_id}/orders", give_order, methods=["POST"]),
        Route("/jobs/{job_id}", job_page),
    ]


def is_own_user(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> bool:
    """Return whether a connection's client is a program of this process's user (or root) on this machine. Where the
    system does not tell users, whether it is on this machine."""
    if not client or not server or server[1] is None:
        return False
    try:
        is_here = ipaddress.ip_address(client[0]).is_loopback
        return is_here and is_peer_allowed((client[0], client[1]), (server[0], server[1]), frozenset())
    except (ValueError, OSError):  # a socket without an address
        return False


def _json(value: object, status: int = 200) -> Response:
    """Return JSON in ASCII: a lone surrogate, which a node may have written, has no UTF-8."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, media_type="application/json")


def _refuse(words: str, status: int) -> Response:
    """Return the answer that something cannot be done or read, in words, without secrets."""
    return PlainTextResponse(redact(words).encode(errors="replace"), status)


def _read_number(text: str) -> int:
    """Return a whole number of a query; 0 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0

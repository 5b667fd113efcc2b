"""The page of one job, ``/jobs/<job id>``, and what it asks for: figures, facts, costs, logs, orders."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.supervision.engine import EngineUnreachableError
from dtrain_dagster.dashboard import page
from dtrain_dagster.dashboard.answers import encode, read_number, refuse, respond
from dtrain_dagster.dashboard.job_board import CANNOT_READ, JobBoard, OpenJob
from dtrain_dagster.dashboard.job_links import Places
from dtrain_dagster.dashboard.log_pages import LogSource
from dtrain_dagster.dashboard.orders import OrderDesk, OrderRefusedError, judge_order
from dtrain_dagster.support.audit import AuditError
from dtrain_dagster.web.peer import is_peer_allowed

NO_LOGS = "the logs of this job are not on this machine: `dtrain logs` asks its cluster for them"


@dataclass(frozen=True, kw_only=True)
class JobServices:
    """What a job's page offers beside what its run directory says."""

    places: Places = field(default_factory=Places)
    logs: LogSource | None = None
    """None: logs are not shown."""
    desk: OrderDesk | None = None
    """None: the page gives no orders."""


def job_routes(board: JobBoard, services: JobServices) -> list[Route]:
    """Return the routes of a job's page."""

    def of_job(answer: Callable[[Request, OpenJob], Response]) -> Callable[[Request], Response]:
        """Return an endpoint that answers from an open job, and in words where it cannot."""

        def endpoint(request: Request) -> Response:
            try:
                found = board.open(request.path_params["job_id"], time.time())
                if found is None:
                    return refuse("there is no job of that name", 404)
                return answer(request, found)
            except (ClusterError, EngineUnreachableError) as error:
                return refuse(str(error), 500)
            except CANNOT_READ as error:
                return refuse(f"its run directory cannot be read: {type(error).__name__}: {error}", 500)

        return endpoint

    def job_page(request: Request) -> Response:
        return HTMLResponse(page.live_job_page(gives_orders=services.desk is not None))

    def figures(request: Request) -> Response:
        tag = board.tag(request.path_params["job_id"])  # asked first: what is read afterwards is no older
        if tag and request.headers.get("if-none-match") == tag:  # of many ended jobs few are held in memory
            return Response(status_code=304, headers={"etag": tag})

        def answer(request: Request, found: OpenJob) -> Response:
            asked = request.query_params
            body = encode(found.snapshot(read_number(asked.get("since", "")), asked.get("token", ""), time.time()))
            return respond(request, body, tag if found.settled else "")

        return of_job(answer)(request)

    def facts(request: Request, found: OpenJob) -> Response:
        return respond(request, encode(found.facts(services.places)))

    def account(request: Request, found: OpenJob) -> Response:
        return respond(request, encode(asdict(found.account(time.time()))))

    def logs(request: Request, found: OpenJob) -> Response:
        if services.logs is None:
            return refuse(NO_LOGS, 404)
        asked = request.query_params
        node = read_number(asked["node"]) if asked.get("node") else None
        lines = services.logs.page(found.row.job_id, node, asked.get("cursor", ""))
        return respond(request, encode(asdict(lines)))

    def orders(request: Request, found: OpenJob) -> Response:
        if services.desk is None:
            return refuse("this dashboard does not take orders", 404)
        described = services.desk.describe(found.row.job_id, found.row.state)
        last = described["last"]
        return respond(request, encode(described | {"last": asdict(last) if last else None}))

    async def give_order(request: Request) -> Response:
        desk = services.desk
        if desk is None:
            return refuse("this dashboard does not take orders", 404)
        host, given = request.url.hostname or "", request.headers.get("authorization", "")
        is_own = is_own_user(request.scope.get("client"), request.scope.get("server"))
        if refused := judge_order(host, given, desk.token, is_own):
            return refuse(refused, 401 if desk.token is not None else 403)
        asked = _asked(await request.body())

        def answer(request: Request, found: OpenJob) -> Response:
            try:
                state = desk.give(found.rundir, found.row.job_id, found.row.state, str(asked.get("order", "")))
            except (OrderRefusedError, AuditError) as error:
                return refuse(str(error), 409)
            return Response(encode(asdict(state)), 202, media_type="application/json")

        return await run_in_threadpool(of_job(answer), request)

    return [
        Route("/jobs/{job_id}.json", figures),
        Route("/jobs/{job_id}/facts.json", of_job(facts)),
        Route("/jobs/{job_id}/account.json", of_job(account)),
        Route("/jobs/{job_id}/logs.json", of_job(logs)),
        Route("/jobs/{job_id}/orders.json", of_job(orders)),
        Route("/jobs/{job_id}/orders", give_order, methods=["POST"]),
        Route("/jobs/{job_id}", job_page),
    ]


def _asked(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


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

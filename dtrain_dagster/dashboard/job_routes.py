"""The page of one job, ``/jobs/<job id>``, and what it asks for: figures, facts, costs, logs, traces, orders."""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from anyio import from_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.supervision.engine import EngineUnreachableError
from dtrain_dagster.dashboard import page
from dtrain_dagster.dashboard.answers import answer_json, encode, read_number
from dtrain_dagster.dashboard.job_board import CANNOT_READ, JobBoard, OpenJob
from dtrain_dagster.dashboard.job_links import Places
from dtrain_dagster.dashboard.log_pages import LeftError, LogSource
from dtrain_dagster.dashboard.orders import OrderDesk, OrderRefusedError, judge_order
from dtrain_dagster.support.audit import AuditError
from dtrain_dagster.web.peer import is_peer_allowed
from trainer.rundir import PROFILE, RunDir
from trainer.storage.regular_files import open_regular

MOST_TEXT = 200
MOST_TRACES = 100
"""The most traces that are listed: the newest."""
TRACE_BYTES = 128 << 20
"""The largest trace that is read from remote storage."""
PIECE_BYTES = 256 << 10
_TRACE = re.compile(r"trace-r(\d{1,9})-s(\d{1,15})\.json")
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
                    return _refusal("there is no job of that name", 404)
                return answer(request, found)
            except FileNotFoundError:
                return _refusal("there is no such file of this job", 404)
            except (ClusterError, EngineUnreachableError) as error:
                return _refusal(str(error), 500)
            except CANNOT_READ as error:
                return _refusal(f"its run directory cannot be read: {type(error).__name__}: {error}", 500)

        return endpoint

    def job_page(request: Request) -> Response:
        return HTMLResponse(page.live_job_page(gives_orders=services.desk is not None))

    def figures(request: Request) -> Response:
        tag = board.tag(request.path_params["job_id"])  # asked first: what is read afterwards is no older
        if tag is not None and request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})

        def answer(request: Request, found: OpenJob) -> Response:
            asked = request.query_params
            body = encode(found.snapshot(read_number(asked.get("since", "")), asked.get("token", ""), time.time()))
            return answer_json(request, body, tag if found.settled else None)

        return of_job(answer)(request)

    def facts(request: Request, found: OpenJob) -> Response:
        return answer_json(request, encode(found.facts(services.places)), None)

    def account(request: Request, found: OpenJob) -> Response:
        return answer_json(request, encode(asdict(found.account(time.time()))), None)

    def logs(request: Request, found: OpenJob) -> Response:
        if services.logs is None:
            return _refusal(NO_LOGS, 404)
        asked = request.query_params
        node = read_number(asked["node"]) if asked.get("node") else None
        text, cursor = asked.get("text", "")[:MOST_TEXT], asked.get("cursor", "")

        def is_wanted() -> bool:
            return not from_thread.run(request.is_disconnected)

        try:
            lines = services.logs.page(found.row.job_id, node, text, cursor, is_wanted)
        except LeftError as error:
            return _refusal(str(error), 409)
        return answer_json(request, encode(asdict(lines)), None)

    def traces(request: Request, found: OpenJob) -> Response:
        return answer_json(request, encode(list_traces(found.rundir)), None)

    def trace_file(request: Request, found: OpenJob) -> Response:
        name = request.path_params["name"]
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        # In pieces, as fast as the browser takes them: whole, it would wait in memory for each slow one.
        return StreamingResponse(trace_pieces(found.rundir, name), media_type="application/json", headers=headers)

    def orders(request: Request, found: OpenJob) -> Response:
        if services.desk is None:
            return _refusal("this dashboard does not take orders", 404)
        described = services.desk.describe(found.row.job_id, found.row.state)
        last = described["last"]
        return answer_json(request, encode(described | {"last": asdict(last) if last else None}), None)

    async def give_order(request: Request) -> Response:
        desk = services.desk
        if desk is None:
            return _refusal("this dashboard does not take orders", 404)
        host, given = request.url.hostname or "", request.headers.get("authorization", "")
        is_own = is_own_user(request.scope.get("client"), request.scope.get("server"))
        if refused := judge_order(host, given, desk.token, is_own):
            return _refusal(refused, 401 if desk.token is not None else 403)
        asked = _asked(await request.body())

        def answer(request: Request, found: OpenJob) -> Response:
            try:
                state = desk.give(found.rundir, found.row.job_id, found.row.state, str(asked.get("order", "")), asked)
            except (OrderRefusedError, AuditError) as error:
                return _refusal(str(error), 409)
            return Response(encode(asdict(state)), 202, media_type="application/json")

        return await run_in_threadpool(of_job(answer), request)

    return [
        Route("/jobs/{job_id}.json", figures),
        Route("/jobs/{job_id}/facts.json", of_job(facts)),
        Route("/jobs/{job_id}/account.json", of_job(account)),
        Route("/jobs/{job_id}/logs.json", of_job(logs)),
        Route("/jobs/{job_id}/traces.json", of_job(traces)),
        Route("/jobs/{job_id}/traces/{name}", of_job(trace_file)),
        Route("/jobs/{job_id}/orders.json", of_job(orders)),
        Route("/jobs/{job_id}/orders", give_order, methods=["POST"]),
        Route("/jobs/{job_id}", job_page),
    ]


def list_traces(rundir: RunDir) -> list[dict[str, Any]]:
    """Return name, rank and last step of a job's traces, the newest first."""
    found: list[dict[str, Any]] = [
        {"name": name, "rank": int(match[1]), "step": int(match[2])}
        for name in rundir.storage.list(PROFILE)
        if (match := _TRACE.fullmatch(name))
    ]
    return sorted(found, key=lambda item: (-item["step"], item["rank"]))[:MOST_TRACES]


def trace_pieces(rundir: RunDir, name: str) -> Iterator[bytes]:
    """Return a trace as it was written, in pieces; on remote storage it is read first. Raise FileNotFoundError where
    there is none of that name, `DamagedError` for one that is too large or no file."""
    if not _TRACE.fullmatch(name):
        raise FileNotFoundError(name)
    if not rundir.storage.is_local:
        return iter([rundir.storage.read_bounded(f"{PROFILE}/{name}", TRACE_BYTES)])
    return _pieces(open_regular(str(rundir.storage.local_path()), f"{PROFILE}/{name}"))


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _refusal(words: str, status: int) -> Response:
    return PlainTextResponse(words.encode(errors="replace"), status)


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

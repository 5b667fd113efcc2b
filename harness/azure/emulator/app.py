"""The two faces of the emulator: the ARM surface (TLS, tokens, faults, every request recorded) and the control port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from starlette.routing import Match, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from harness.azure.emulator.answers import Refusal, scope_not_found
from harness.azure.emulator.certificates import Certificates
from harness.azure.emulator.faults import Fault
from harness.azure.emulator.identity import Identity
from harness.azure.emulator.permissions import action_of, refuse_unless_granted
from harness.azure.emulator.state import RESOURCE_GROUP, SUBSCRIPTION, WORKSPACE, Cloud, Request

WITHOUT_TOKEN = ("metadata.get", "discovery.get")
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class DroppingProtocol(H11Protocol):
    """Lets a request reach its own connection, so that a fault can cut it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}


class QuietServer(uvicorn.Server):
    """Leaves signals to the program: there are two servers in it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def new_app() -> FastAPI:
    """Without pages of documentation; a `Refusal` becomes ARM's error. All its handlers are coroutines, so that nothing
    changes the cloud while something else looks at it: there is one thread for all of it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refusal)
    async def refused(_: HttpRequest, refusal: Refusal) -> JSONResponse:
        return refusal.answer()

    return app


def new_server(app: Any, certificates: Certificates | None, port: int) -> tuple[QuietServer, socket.socket]:
    """A server on loopback and its bound socket; ``port`` 0 picks a free one."""
    # With the protocol's name, or asyncio leaves Nagle's algorithm on: each answer waits 40 ms for the client's ACK.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=DroppingProtocol,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=1,
        ssl_certfile=str(certificates.server) if certificates else None,
        ssl_keyfile=str(certificates.key) if certificates else None,
        ssl_version=ssl.PROTOCOL_TLS_SERVER,
    )
    return QuietServer(config), listener


class Surface:
    """Around the ARM app: names each request's operation, records it, checks its token, and lets faults strike."""

    def __init__(self, app: FastAPI, cloud: Cloud, identity: Identity) -> None:
        self.app, self.cloud, self.identity = app, cloud, identity
        self._routes: list[Route] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: _Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = await _read(receive)
        record = self._record(scope, body)
        self.cloud.requests.append(record)

        async def again() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def recording(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-ms-request-id", record.request_id.encode())]
            await send(message)

        try:
            self._check(record, scope)
        except Refusal as refusal:
            return await refusal.answer()(scope, again, recording)
        fault = self.cloud.faults.of_request(record.operation)
        if fault is None:
            return await self.app(scope, again, recording)
        record.fault = fault.kind
        if fault.kind == "slow":
            await asyncio.sleep(fault["seconds"])
            return await self.app(scope, again, recording)
        if fault.fields.get("moment") == "after":
            await self.app(scope, again, _nowhere)
        if fault.kind == "drop":
            scope["state"]["transport"].abort()
            return None
        return await _answer(fault)(scope, again, recording)

    def _record(self, scope: MutableMapping[str, Any], body: bytes) -> Request:
        query = HttpRequest(scope).query_params
        parsed: Any = None
        if body[:1] in (b"{", b"["):
            with contextlib.suppress(ValueError):
                parsed = json.loads(body)
        return Request(
            at=self.cloud.clock.now(),
            operation=self._operation(scope),
            method=scope["method"],
            path=scope["path"],
            query=dict(query),
            body=parsed,
        )

    def _operation(self, scope: MutableMapping[str, Any]) -> str:
        if self._routes is None:
            self._routes = [route for route in flat(self.app.routes) if isinstance(route, Route)]
        for route in self._routes:
            if route.matches(scope)[0] == Match.FULL:
                return route.name
        return "unknown"

    def _check(self, record: Request, scope: MutableMapping[str, Any]) -> None:
        if record.operation in WITHOUT_TOKEN:
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        claims = self.identity.check(headers.get(b"authorization"), self.cloud.addresses.base)
        parts = record.path.split("/")
        for word, expected in (
            ("subscriptions", SUBSCRIPTION), ("resourceGroups", RESOURCE_GROUP), ("workspaces", WORKSPACE),
        ):  # fmt: skip
            if word in parts and (found := parts[parts.index(word) + 1]) != expected:
                raise scope_not_found(word, found, record.path)
        record.action = action_of(record.method, record.path)
        if record.action:
            refuse_unless_granted(claims, record.action, record.path, self.cloud.granted, self.cloud.denied)


def flat(routes: Any) -> Iterator[Any]:
    """All routes, those of included routers too, whichever way this FastAPI keeps them."""
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        if inner:
            yield from flat(inner)
        else:
            yield route


def _answer(fault: Fault) -> JSONResponse:
    if fault.kind == "throttle":
        wait = str(fault["retry_after_seconds"])
        refusal = Refusal(429, "TooManyRequests", "Rate limit reached; try again later.", {"Retry-After": wait})
    else:
        words = fault["message"] or "The service has a problem of its own."
        refusal = Refusal(fault["status"], fault["code"], words)
    return refusal.answer()


async def _nowhere(_: MutableMapping[str, Any]) -> None:
    """Where an answer goes that nobody gets."""


async def _read(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def tick_forever(tick: Callable[[], None], seconds: float = 0.03) -> None:
    """Let time pass in the emulated cloud. An error here is a bug of the emulator: it ends it, loudly."""
    while True:
        started = time.monotonic()
        tick()
        await asyncio.sleep(max(seconds, time.monotonic() - started))

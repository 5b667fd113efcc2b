"""How this project serves HTTP: on a socket that is bound first, and to whoever keeps pace.

uvicorn waits for ever for a request that is begun and never completed, and for ever for a client that reads nothing of
its answer. Here such a client has `REQUEST_SECONDS`, and makes room earlier where there are more than
`MOST_CONNECTIONS`: the one that has waited longest goes first, so that whoever sends a whole request is answered.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dtrain_dagster.web.peer import is_peer_allowed

MOST_CONNECTIONS = 512
"""So many are held at once, but for websockets; below the usual limit of 1,024 descriptors."""
REQUEST_SECONDS = 20.0
"""From the first byte to the last of a request, and between two pieces that a client takes of its answer."""
DESCRIPTORS = 65_536
BACKLOG = 2048
MOST_HELD_BYTES = 64 * 2**10
STRANGER = (
    b"HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"this server is another user's, or it cannot tell whose program asks: see its option --allow-user.\n"
)


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's, with an end to its patience. One object is one connection; all belong to one event loop."""

    users: frozenset[int] | None = None
    """Who may connect besides this user and root; None for anybody."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turn_at = time.monotonic()
        """When it became the client's turn, or ours."""
        self._asking = True
        """It is the client's turn: no request of it is whole."""
        self._unread, self._took_at = 0, 0.0
        """Bytes of answers that the client has not taken yet at the last look, and when they last changed."""
        self._timer: asyncio.TimerHandle | None = None
        self._known = self.users is None
        """The client is one that may use this server."""
        self._held = b""
        """What has come before that was known."""

    def data_received(self, data: bytes) -> None:
        if not self._known and self.users is not None:
            # Only of who has asked something whole: the answer costs more than half a request.
            self._held = data = self._held + data
            if b"\r\n\r\n" not in data:
                if len(data) > MOST_HELD_BYTES:
                    self.drop()
                return
            client, here = (self.transport.get_extra_info(name) for name in ("peername", "sockname"))
            self._known = bool(client and here) and is_peer_allowed(client[:2], here[:2], self.users)
            if not self._known:
                self.transport.write(STRANGER)
                self.transport.close()
                return
            self._held = b""
        super().data_received(data)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin(asking=True)
        self._look_later()
        if len(self.connections) > MOST_CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, PatientProtocol) and one.keeps_waiting]
            if waiting:
                min(waiting, key=lambda one: one._turn_at).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin(asking=True)
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._begin(asking=False)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:  # uvicorn ends the wait for the next request after 5 s, if nothing of it comes
            self._begin(asking=True)
        super().on_response_complete()

    @property
    def keeps_waiting(self) -> bool:
        """Is it the client that has to do something: complete a request, or take its answer?"""
        return self._asking or self.transport.get_write_buffer_size() > 0

    def drop(self) -> None:
        """End the connection now; what was not sent yet is lost."""
        self.connections.discard(self)
        self.transport.abort()

    def _begin(self, asking: bool) -> None:
        self._turn_at, self._asking = time.monotonic(), asking

    def _look_later(self) -> None:
        self._timer = self.loop.call_later(REQUEST_SECONDS / 4, self._look)

    def _look(self) -> None:
        """Is the client as far as it should be?"""
        if self not in self.connections:  # it has become a websocket, or has ended
            return
        now, unread = time.monotonic(), self.transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread, self._took_at = unread, now
        since = self._took_at if unread else self._turn_at
        if self.keeps_waiting and now - since > REQUEST_SECONDS:
            self.drop()
        else:
            self._look_later()


def listener(host: str, port: int) -> socket.socket:
    """A socket that is bound to this address; OSError where that is taken. Port 0 takes a free one."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)  # who connects before the server is up waits
    except OSError:
        made.close()
        raise
    return made


def address(bound: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def server(app: ASGIApp, *, websockets: bool = False, users: frozenset[int] | None = None) -> uvicorn.Server:
    """A server of this application, which brings its `web_guard.Guard`. `uvicorn.Server.run` it with a `listener`. It
    ends on SIGINT and SIGTERM, which it then raises anew, or when its ``should_exit`` is set. ``users``: who may
    connect over loopback besides this user and root; None for anybody."""
    raise_descriptors()
    config = uvicorn.Config(
        app,
        http=type("Protocol", (PatientProtocol,), {"users": users}),
        ws="auto" if websockets else "none",
        ws_max_size=2**20,
        log_level="error",  # what clients do wrong is not told: there may be thousands of them
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=2 * MOST_CONNECTIONS,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)


def raise_descriptors() -> None:
    """Take as many descriptors as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has a limit of its own below that
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""The HTTP server of this project: it serves a socket that is bound first, and always has room for one more client.

uvicorn waits for ever for a request that is begun and never completed, and for a client that reads nothing of its
answer. Here such a client makes room where there are more than `MOST_CONNECTIONS`: the one that has waited longest goes
first, so that a client that sends a whole request is answered.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dtrain_dagster.web.peer import is_peer_allowed

MOST_CONNECTIONS = 512
"""The most connections at once, websockets not counted; below the usual limit of 1,024 descriptors."""
DESCRIPTORS = 65_536
BACKLOG = 2048
STRANGER = (
    b"HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"this server is another user's, or it cannot tell whose program asks: see its option --allow-user.\n"
)


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which knows whose turn it is. One object is one connection; all belong to one event loop."""

    users: frozenset[int] | None = None
    """The users that may connect besides this user and root; None for all."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turn_at = time.monotonic()
        """The time when the present turn, the client's or the server's, began."""
        self._asking = True
        """Whether it is the client's turn: no request of it is complete."""
        self._known = self.users is None
        """Whether the client is known to be allowed."""

    def data_received(self, data: bytes) -> None:
        """Pass received bytes on, once the client's user is known to be allowed; refuse other users."""
        if not self._known and self.users is not None:
            client, here = (self.transport.get_extra_info(name) for name in ("peername", "sockname"))
            self._known = bool(client and here) and is_peer_allowed(client[:2], here[:2], self.users)
            if not self._known:
                self.transport.write(STRANGER)
                self.transport.close()
                return
        super().data_received(data)

    def connection_made(self, transport: Any) -> None:
        """Where there are too many connections, drop the one that keeps the server waiting longest."""
        super().connection_made(transport)
        self._begin(asking=True)
        if len(self.connections) > MOST_CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, PatientProtocol) and one.keeps_waiting]
            if waiting:
                longest = min(waiting, key=lambda one: one._turn_at)
                self.connections.discard(longest)
                longest.transport.abort()

    def on_message_begin(self) -> None:
        """Note that the client's turn began."""
        self._begin(asking=True)
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Note that the client's turn ended."""
        self._begin(asking=False)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note that the client's turn began again, unless its next request is there already."""
        if not self.pipeline:  # uvicorn ends the wait for the next request after 5 s, if nothing of it comes
            self._begin(asking=True)
        super().on_response_complete()

    @property
    def keeps_waiting(self) -> bool:
        """Whether the server waits for the client, to complete a request or to read its answer."""
        return self._asking or self.transport.get_write_buffer_size() > 0

    def _begin(self, asking: bool) -> None:
        self._turn_at, self._asking = time.monotonic(), asking


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to this address. Raise OSError where that is taken. Port 0 takes a free one."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)  # a client that connects before the server is up waits
    except OSError:
        made.close()
        raise
    return made


def address(bound: socket.socket) -> str:
    """Return the socket's address as a URL for a browser."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def server(app: ASGIApp, *, websockets: bool = False, users: frozenset[int] | None = None) -> uvicorn.Server:
    """Return a server of this application, which brings its `guard.Guard`, for `serve`. ``users``: the users that may
    connect over loopback besides this user and root; None for all."""
    raise_descriptors()
    config = uvicorn.Config(
        app,
        http=type("Protocol", (PatientProtocol,), {"users": users}),
        ws="auto" if websockets else "none",
        ws_max_size=2**20,
        log_level="error",  # clients' mistakes are not logged: there may be thousands of them
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=2 * MOST_CONNECTIONS,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)


def serve(web: uvicorn.Server, bound: socket.socket, tell: Callable[[], None]) -> None:
    """Tell people the address, and serve on this socket of `listener` until SIGINT or SIGTERM, which are then raised
    again, or until ``should_exit`` of the server is set. A Ctrl-C counts from the telling on: as an exception, it would
    be lost in a callback of the garbage collector, such as those of the imports that follow."""
    with web.capture_signals():
        tell()
        web.run(sockets=[bound])


def raise_descriptors() -> None:
    """Raise this process's limit of descriptors to the highest that it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has a limit of its own below that
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

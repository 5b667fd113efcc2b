"""Half requests, and answers that nobody reads, shut nobody else out: not of the dashboard, not of `dtrain ui`."""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dtrain_dagster.web import server as web_server
from tests.abuse.websites import served

HALVES = (
    b"",
    b"GE",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{",
    b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",  # the client reads none of the megabytes of the answer
)
"""Requests that are not complete, or whose answer is not read."""


class Pages:
    """A small page, one that is large, and one that waits for the test."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Semaphore(0), threading.Event()
        self.routes = [Route("/", self.small), Route("/large", self.large), Route("/slow", self.slow)]

    def small(self, request: Request) -> Response:
        return PlainTextResponse("done")

    def large(self, request: Request) -> Response:
        return PlainTextResponse("x" * 2**23)

    def slow(self, request: Request) -> Response:
        self.asked.release()
        self.go_on.wait(60)
        return PlainTextResponse("done")


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def port(pages: Pages) -> Iterator[int]:
    with served(Starlette(routes=pages.routes)) as made:
        yield made


def connected(port: int, data: bytes) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(60)
    made.connect(("127.0.0.1", port))
    with suppress(OSError):  # it may have had to make room already
        made.sendall(data)
    return made


def rest_of(client: socket.socket) -> bytes:
    """What comes until the server ends the connection, in whichever way."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := client.recv(2**20):
            received += piece
    return bytes(received)


def answers(port: int) -> bool:
    """Whether an ordinary request is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read() == b"done"
    finally:
        connection.close()


@pytest.mark.slow
def test_an_ordinary_client_is_answered_beside_more_half_requests_than_there_may_be_connections(port: int):
    web_server.raise_descriptors()
    chance = random.Random(0)
    with ExitStack() as stack:
        for _ in range(web_server.MOST_CONNECTIONS + 90):
            stack.enter_context(connected(port, chance.choice(HALVES)))
        assert all(answers(port) for _ in range(10))


@pytest.mark.parametrize("half", HALVES)
def test_the_one_that_has_waited_longest_makes_room(
    pages: Pages, port: int, monkeypatch: pytest.MonkeyPatch, half: bytes
):
    monkeypatch.setattr(web_server, "MOST_CONNECTIONS", 5)
    with ExitStack() as stack:
        busy = stack.enter_context(connected(port, b"GET /slow HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"))
        assert pages.asked.acquire(timeout=60)
        first = stack.enter_context(connected(port, half))
        assert b"large" not in half or first.recv(1, socket.MSG_PEEK)
        others = [stack.enter_context(connected(port, b"GE")) for _ in range(web_server.MOST_CONNECTIONS - 1)]
        assert len(rest_of(first)) < 2**23
        for other in others:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)
        pages.go_on.set()
        assert rest_of(busy).endswith(b"done"), "it was the server's turn there"

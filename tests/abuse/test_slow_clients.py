"""Half requests, and answers that nobody reads, shut nobody else out: not of the dashboard, not of `dtrain ui`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dtrain_dagster.web import server as web_server
from tests.abuse.slow_clients import answers, dashboard, half_requests
from tests.abuse.websites import served
from tests.e2e.conftest import make_project, start_dagster, stop_dagster

MANY = 1200
PATIENCE = 0.5


@pytest.mark.slow
def test_the_dashboard_answers_beside_1200_half_requests(tmp_path: Path):
    with dashboard(tmp_path) as port:
        assert answers(port, seconds=60.0)
        with half_requests(port, Random(0), MANY) as opened:
            assert len(opened) == MANY
            assert all(answers(port) for _ in range(10))


@pytest.mark.long
def test_dtrain_ui_answers_beside_1200_half_requests(tmp_path: Path):
    server = start_dagster(make_project(tmp_path / "home"))
    try:
        with half_requests(server.port, Random(1), MANY):
            assert all(answers(server.port, "/server_info") for _ in range(10))
    finally:
        stop_dagster(server)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server with little patience, and a page that takes longer than that."""

    async def slow(request: Request) -> Response:
        await asyncio.sleep(4 * PATIENCE)
        return PlainTextResponse("done")

    def large(request: Request) -> Response:
        return PlainTextResponse("x" * 2**25)

    monkeypatch.setattr(web_server, "REQUEST_SECONDS", PATIENCE)
    monkeypatch.setattr(web_server, "MOST_CONNECTIONS", 20)
    with served(Starlette(routes=[Route("/slow", slow), Route("/large", large)])) as made:
        yield made


def connected(port: int, data: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=60)
    made.sendall(data)
    return made


def rest_of(client: socket.socket) -> bytes:
    """What comes until the server ends the connection, in whichever way."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := client.recv(2**20):
            received += piece
    return bytes(received)


HALVES = (b"", b"GET / HTTP/1.1\r\nHost: ", b"POST /slow HTTP/1.1\r\nContent-Length: 9\r\n\r\n1")


@pytest.mark.parametrize("half", HALVES)
def test_who_does_not_end_a_request_is_dropped(port: int, half: bytes):
    with connected(port, half) as client:
        assert b"200 OK" not in rest_of(client)


def test_one_byte_now_and_then_is_no_reason_to_wait(port: int):
    with connected(port, b"GET / HTTP/1.1\r\n") as client:
        for _ in range(1000):
            try:
                client.sendall(b"X")
            except (ConnectionResetError, BrokenPipeError):
                return
            time.sleep(0.05)
    pytest.fail("the server still waits")


def test_who_takes_nothing_of_an_answer_is_dropped(port: int):
    with connected(port, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n") as client:
        time.sleep(4 * PATIENCE)
        assert len(rest_of(client)) < 2**25


def test_an_answer_that_takes_long_is_waited_for(port: int):
    with connected(port, b"GET /slow HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") as client:
        assert rest_of(client).endswith(b"done")


def test_the_one_that_has_waited_longest_makes_room(port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web_server, "REQUEST_SECONDS", 60.0)
    with ExitStack() as stack:
        busy = stack.enter_context(connected(port, b"GET /slow HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"))
        first = stack.enter_context(connected(port, b"GE"))
        others = [stack.enter_context(connected(port, b"GE")) for _ in range(web_server.MOST_CONNECTIONS - 1)]
        assert rest_of(first) == b""
        for other in others:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)
        assert rest_of(busy).endswith(b"done"), "it was the server's turn there"

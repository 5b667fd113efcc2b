"""Another user of the same machine, who may connect to any port of loopback, at the servers that act as this user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import requests
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dtrain_dagster.cli.main import main
from dtrain_dagster.web.peer import find_owner, find_peer_user
from tests.abuse.websites import served

NOBODY = 65534
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 17
   1: 0100007F:9C40 0100007F:0BB8 01 00000000:00000000 00:00000000 00000000  1001        0 18
   2: 0100007F:0BB8 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 19
   3: 0100007F:9C41 0100007F:0BB8 04 00000000:00000000 00:00000000 00000000     0        0 0
"""
TCP6 = """  sl  local_address remote_address st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode
   0: 0000000000000000FFFF00000100007F:9C42 0000000000000000FFFF00000100007F:0BB8 01 0:0 00:0 0 1002 0 20
"""
HERE = ("127.0.0.1", 3000)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who is at the other end")


@pytest.mark.skipif(sys.byteorder != "little", reason="the table is one of a little-endian machine")
@pytest.mark.parametrize(
    ("port", "user"),
    [(40000, 1001), (40001, None), (40002, 1002), (40003, None), (3000, None)],
    ids=["open", "closed by its process, which looks like root's", "of an IPv6 socket", "unknown", "the server's own"],
)
def test_the_user_is_read_from_the_clients_end(port: int, user: int | None):
    assert find_owner([TCP, TCP6], ("127.0.0.1", port), HERE) == user


@on_linux
@pytest.mark.parametrize(
    ("family", "here"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_connection_of_ones_own_is_known(family: int, here: str):
    at = socket.AF_INET6 if here == "::1" else socket.AF_INET
    with socket.create_server((here, 0), family=at) as server, socket.socket(family) as client:
        client.connect((here if family == at else f"::ffff:{here}", server.getsockname()[1]))
        accepted, address = server.accept()
        with accepted:
            assert find_peer_user(address[:2], accepted.getsockname()[:2]) == os.getuid()
            assert find_peer_user((here, 1), accepted.getsockname()[:2]) is None
            client.close()
            assert find_peer_user(address[:2], accepted.getsockname()[:2]) is None, "nobody holds it, nobody is trusted"


def ask_as(user: int, port: int, method: str = "GET") -> str:
    """What another user is answered."""
    request = f"{method} / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    code = (
        f"import os, socket, sys; os.setgroups([]); os.setgid({user}); os.setuid({user})\n"
        f"made = socket.socket(); made.connect(('127.0.0.1', {port})); made.sendall({request!r})\n"
        "while piece := made.recv(4096): sys.stdout.buffer.write(piece)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    return done.stdout.decode() or done.stderr.decode()


@on_linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_are_refused_unless_they_are_named():
    called = []

    def page(request: Request) -> Response:
        called.append(request.method)
        return PlainTextResponse("the page")

    app = Starlette(routes=[Route("/", page, methods=["GET", "POST"])])
    for users, allowed in ((frozenset(), False), (frozenset({NOBODY}), True), (None, True)):
        called.clear()
        with served(app, users=users) as port:
            for method in ("GET", "POST"):
                answer = ask_as(NOBODY, port, method)
                assert answer.startswith(f"HTTP/1.1 {200 if allowed else 403} "), answer
                assert allowed or "--allow-user" in answer
            assert requests.get(f"http://127.0.0.1:{port}/", timeout=60).ok
        assert called == (["GET", "POST", "GET"] if allowed else ["GET"])


def test_a_user_that_nobody_knows_is_refused_in_words():
    done = CliRunner().invoke(main, ["ui", "mlflow", "--port", "0", "--allow-user", "nobody-of-that-name"])
    assert (done.exit_code, "nobody-of-that-name" in done.output) == (2, True)

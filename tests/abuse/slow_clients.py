"""Clients that begin requests and do not end them, or ask for much and read nothing, beside an ordinary client.

The target is `dtrain ui jobs` as a process of its own, with the usual limit of 1,024 descriptors.
"""

from __future__ import annotations

import http.client
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from tests.abuse.tally import Tally

DESCRIPTORS = 1024
"""Limit of descriptors of the dashboard's process."""
HALVES = (
    b"",
    b"GE",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ",
    b"\r\n\r\n",
    b"POST /graphql HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{",
    b"GET /plotly.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",  # the client reads none of the megabytes of the answer
)
"""Requests that are not complete, or whose answer is not read."""


@contextmanager
def half_requests(port: int, random: Random, count: int) -> Iterator[list[socket.socket]]:
    """Open ``count`` connections that have begun a request, and yield them. Raises this process's limit of descriptors
    if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 200, hard), hard))
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.settimeout(20)
            opened.append(made)
            with suppress(OSError):  # the server may drop it, or have no descriptor left
                made.connect(("127.0.0.1", port))
                made.sendall(random.choice(HALVES))
        yield opened
    finally:
        for made in opened:
            made.close()


def answers(port: int, path: str = "/", seconds: float = 20.0) -> bool:
    """Return whether the server answers an ordinary request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def dashboard(home: Path) -> Iterator[int]:
    """Run `dtrain ui jobs` with `DESCRIPTORS`, and yield its port."""
    code = (
        f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS})); "
        f"os.environ['DTRAIN_HOME'] = {str(home)!r}; from dtrain_dagster.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "ui", "jobs", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().strip().rstrip("/").rsplit(":", 1)[-1])
    finally:
        process.terminate()
        process.wait(30)


def attack(random: Random, rounds: int) -> Tally:
    """Send 60 half requests per round, but at most 1,500, and hold them open at once."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="dtrain-slow-") as folder, dashboard(Path(folder)) as port:
        assert answers(port, seconds=60.0)
        with half_requests(port, random, min(60 * rounds, 1500)) as opened:
            tally.tried += len(opened)
            for _ in range(5):
                tally.outages += not answers(port)
    tally.findings += ["the dashboard did not answer beside half requests"] * bool(tally.outages)
    return tally

"""A website that the user has open, and its target: Dagster's real web application, with a code location of one job."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlencode

JOB = "canary"
LAUNCH = (
    "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename ... on PythonError { message } } }"
)
"""GraphQL mutation that starts a run."""
PARAMETERS = {
    "p": {
        "selector": {
            "repositoryLocationName": "code.py",
            "repositoryName": "__repository__",
            "pipelineName": JOB,
        },
        "runConfigData": {},
        "mode": "default",
    }
}
MUTATION = {"query": LAUNCH, "variables": json.dumps(PARAMETERS)}
"""The mutation as the parameters of a query."""
OF_DAGSTER = """
telemetry: {enabled: false}
run_coordinator: {module: dagster, class: QueuedRunCoordinator}
"""
"""An instance whose runs wait for a daemon that is not there: they are recorded, and cost no process."""


@dataclass
class Request:
    """A request, as a client sends it over the network."""

    method: str = "GET"
    path: str = "/"
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


def forged(port: int) -> dict[str, Request]:
    """Return requests with a mutation, as a foreign page can send them, by what carries them."""
    here, rebound = ("Host", f"127.0.0.1:{port}"), f"evil.example:{port}"
    origin, site = ("Origin", "http://evil.example"), ("Sec-Fetch-Site", "cross-site")
    as_json, as_text = ("Content-Type", "application/json"), ("Content-Type", "text/plain")
    followed = [site, ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document"), ("Accept", "text/html")]
    query = f"/graphql?{urlencode(MUTATION)}"
    body = json.dumps({"query": LAUNCH, "variables": PARAMETERS}).encode()
    return {
        "an image": Request("GET", query, [here, site, ("Accept", "image/avif,image/webp,*/*;q=0.8")]),
        "an image of an older browser": Request("GET", query, [here, ("Accept", "image/webp,*/*;q=0.8")]),
        "a path that ends a line": Request("GET", query.replace("?", "%0A?"), [here, ("Accept", "*/*")]),
        "a form": Request("POST", query, [here, origin, site, as_text], b"a=b"),
        "a form of an older browser": Request("POST", query, [here, as_text], b"a=b"),
        "a script": Request("POST", "/graphql", [here, origin, site, as_json], body),
        "a script from another port": Request(
            "POST", "/graphql", [here, ("Origin", "http://127.0.0.1:1"), as_json], body
        ),
        "a name that now points here": Request(
            "POST", "/graphql",
            [("Host", rebound), ("Origin", f"http://{rebound}"), ("Sec-Fetch-Site", "same-origin"), as_json], body,
        ),
        "a websocket": Request("GET", "/graphql", [here, *upgrade(), origin]),
        "a link": Request("GET", query, [here, *followed]),
    }  # fmt: skip


def upgrade() -> list[tuple[str, str]]:
    """Return the headers that ask for a websocket of GraphQL."""
    return [
        ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="), ("Sec-WebSocket-Protocol", "graphql-ws"),
    ]  # fmt: skip


def source_of(address: str) -> dict[str, Any]:
    """Return the configuration of a run that reads prices from there."""
    return {"ops": {"stock_prices": {"config": {"source": address}}}}


def send(port: int, request: Request) -> int:
    """Send a request, and return the status of the answer; 101 for a websocket that was opened."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers:
            connection.putheader(name, value)
        if request.body:
            connection.putheader("Content-Length", str(len(request.body)))
        connection.endheaders(request.body or None)
        answer = connection.getresponse()
        if answer.status != 101:
            answer.read()
        return answer.status
    finally:
        connection.close()


@contextmanager
def served(
    app: Any, websockets: bool = False, users: frozenset[int] | None = None, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Serve the application on a port of loopback, in a thread, as the project does, and yield the port."""
    from dtrain_dagster.web.server import listener, server

    with listener(host, 0) as bound:
        made = server(app, websockets=websockets, users=users)
        thread = threading.Thread(target=made.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not made.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield int(bound.getsockname()[1])
        finally:
            made.should_exit = True
            thread.join(30)


@contextmanager
def dagster_app(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield Dagster's web application without any guard, over a code location with one job, and its instance."""
    import dagster as dg

    from dtrain_dagster.web.third_party_uis import run_webserver

    code, home = folder / "code.py", folder / "dagster"
    home.mkdir(parents=True)
    code.write_text(
        "import dagster as dg\n\n@dg.op(config_schema={'source': dg.Field(str, is_required=False)})\n"
        f"def touch(context):\n    pass\n\n@dg.job\ndef {JOB}():\n    touch()\n\n"
        f"defs = dg.Definitions(jobs=[{JOB}])\n"
    )
    workspace = folder / "workspace.yaml"
    workspace.write_text(json.dumps({"load_from": [{"python_file": {"relative_path": str(code)}}]}))
    (home / "dagster.yaml").write_text(OF_DAGSTER)
    given: queue.Queue[Any] = queue.Queue()
    ended = threading.Event()

    def keep(app: Any) -> None:
        given.put(app)
        ended.wait()

    with mock.patch.dict(os.environ, {"DAGSTER_HOME": str(home)}), dg.DagsterInstance.get() as instance:
        thread = threading.Thread(target=run_webserver, args=(workspace, keep), daemon=True)
        with mock.patch.object(signal, "signal"):  # the command sets a handler, which no thread may
            thread.start()
            app = given.get(timeout=120)
        try:
            yield app, instance
        finally:
            ended.set()
            thread.join(60)

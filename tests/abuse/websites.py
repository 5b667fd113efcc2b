"""A website that the user has open sends requests to this machine's servers, as far as a browser allows.

The target is Dagster's real web application with a code location of one job, in a folder of its own, and the dashboard;
both as the project serves them. Each attack is a request with a sign that it comes from a website. It was accepted if
it was answered, and executed if there is a run.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock
from urllib.parse import urlencode

from tests.abuse.tally import Tally

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
FOREIGN_NAMES = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1.", "[::2]", "0.0.0.0")
"""Names of hosts that are not this machine, though some resemble it."""
FOREIGN_ORIGINS = (
    "http://evil.example", "https://evil.example", "null", "http://127.0.0.1", "https://127.0.0.1", "file://",
    "http://localhost:1", "http://127.0.0.1:{port}.evil.example", "http://127.0.0.1:{port}@evil.example",
    "http://evil.example/http://127.0.0.1:{port}", "chrome-extension://abcdef", "http://127.0.0.1:0{port}x", "",
)  # fmt: skip
"""Values of ``Origin`` that are not the page's own."""
SITES = ("cross-site", "same-site", "none, same-origin", "")
"""Values of ``Sec-Fetch-Site`` that are not the page's own."""
SIMPLE_TYPES = (
    "text/plain", "text/plain; application/json", "application/x-www-form-urlencoded", "multipart/form-data",
    "application/graphql", "application/json, text/plain", "text/plain;charset=application/json", None,
)  # fmt: skip
"""Content types that a website may send without permission, and some that look like JSON to a careless reader."""


@dataclass
class Request:
    """A request, as a client sends it over the network."""

    method: str = "GET"
    path: str = "/"
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


def forged(random: Random, port: int) -> Request:
    """Return a request with a mutation or a query, as a foreign page can send it."""
    carrier = random.choice(("image", "form", "fetch", "rebinding", "websocket", "link", "report"))
    here = f"{random.choice(('127.0.0.1', 'localhost'))}:{port}"
    origin = ("Origin", random.choice(FOREIGN_ORIGINS).format(port=port))
    site = ("Sec-Fetch-Site", random.choice(SITES))
    json_body, query = json.dumps({"query": LAUNCH, "variables": PARAMETERS}).encode(), urlencode(MUTATION)
    if carrier == "image":  # older browsers send no Sec-Fetch-Site with it
        more = [("Accept", "image/avif,image/webp,*/*;q=0.8")] + ([site] if random.random() < 0.7 else [])
        return Request("GET", f"/graphql?{query}", [("Host", here), *more])
    if carrier == "form":
        kind = random.choice(SIMPLE_TYPES)
        headers = [("Host", here), *([("Content-Type", kind)] if kind else [])]
        headers += [origin] if random.random() < 0.5 else []
        headers += [site] if random.random() < 0.5 else []
        path = random.choice(("/graphql", f"/graphql?{query}"))
        return Request("POST", path, headers, random.choice((json_body, LAUNCH.encode(), query.encode())))
    if carrier == "fetch":
        foreign = random.choice(([origin], [site], [origin, site]))
        headers = [("Host", here), ("Content-Type", "application/json"), *foreign]
        return Request(random.choice(("POST", "POST", "PUT", "OPTIONS")), "/graphql", headers, json_body)
    if carrier == "rebinding":  # the page's own name now resolves to this machine: to the browser this is same-origin
        name = random.choice(FOREIGN_NAMES)
        headers = [("Host", f"{name}:{port}"), ("Origin", f"http://{name}:{port}"), ("Sec-Fetch-Site", "same-origin")]
        return Request("POST", "/graphql", [*headers, ("Content-Type", "application/json")], json_body)
    if carrier == "websocket":
        headers = [("Host", here), ("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")]
        headers += [("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="), ("Sec-WebSocket-Protocol", "graphql-ws")]
        return Request("GET", "/graphql", [*headers, *([origin] if random.random() < 0.8 else [])])
    if carrier == "link":
        headers = [
            ("Host", here),
            ("Sec-Fetch-Site", "cross-site"),
            ("Sec-Fetch-Mode", "navigate"),
            ("Accept", "text/html"),
        ]
        frame = random.random() < 0.5
        path = "/" if frame else random.choice((f"/graphql?{query}", "/jobs/canary/playground/setup?config=x: 1"))
        return Request(
            "GET", path.replace(" ", "%20"), [*headers, ("Sec-Fetch-Dest", "iframe" if frame else "document")]
        )
    path = f"/report_asset_materialization/{random.choice('abc')}?metadata=%7B%7D"
    return Request("POST", path, [("Host", here), random.choice((origin, site)), ("Content-Type", "text/plain")], b"{}")


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
        if request.body or request.method not in ("GET", "HEAD"):
            connection.putheader("Content-Length", str(len(request.body)))
        connection.endheaders(request.body or None)
        answer = connection.getresponse()
        if answer.status != 101:
            answer.read()
        return answer.status
    finally:
        connection.close()


def own_page(port: int) -> Request:
    """Return a request that the page of the UI sends."""
    headers = [("Host", f"127.0.0.1:{port}"), ("Origin", f"http://127.0.0.1:{port}"), ("Sec-Fetch-Site", "same-origin")]
    return Request("POST", "/graphql", [*headers, ("Content-Type", "application/json")], b'{"query": "{ version }"}')


@contextmanager
def served(app: Any, websockets: bool = False, users: frozenset[int] | None = None) -> Iterator[int]:
    """Serve the application on a port of loopback, in a thread, as the project does, and yield the port."""
    from dtrain_dagster.web.server import listener, server

    with listener("127.0.0.1", 0) as bound:
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
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}")
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


def attack(random: Random, rounds: int) -> Tally:
    """Forge ten requests per round to Dagster's UI and to the dashboard."""
    from dtrain_dagster.dashboard.job_board import JobBoard
    from dtrain_dagster.dashboard.server import build_app
    from dtrain_dagster.web.guard import Guard
    from dtrain_dagster.web.third_party_uis import ui_rules

    tally = Tally()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dtrain-websites-")))
        app, instance = stack.enter_context(dagster_app(folder))
        ui = stack.enter_context(served(Guard(app, ui_rules()), websockets=True))
        dashboard = stack.enter_context(served(build_app(JobBoard(str(folder / "jobs"), "dedicated"))))
        for number in range(10 * rounds):
            port = ui if number % 5 else dashboard
            request = forged(random, port)
            tally.tried += 1
            status = send(port, request)
            if status < 400:
                tally.accepted += 1
                tally.findings.append(f"{request.method} {request.path[:60]} {request.headers}: {status}")
        runs = len(instance.get_runs())
        tally.executed += runs
        tally.findings += [f"{runs} runs were started by websites"] * bool(runs)
        if send(ui, own_page(ui)) != 200:
            tally.outages += 1
            tally.findings.append("the UI no longer answers its own page")
    return tally

"""Other websites, open in the user's browser, against every server that the project starts.

The decision alone, as a matrix; forged requests against the real web applications, and what the same requests do where
there is no guard; and a real Chromium with a foreign page beside a running `dtrain ui`.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import dagster as dg
import psutil
import pytest
import requests
from playwright.sync_api import Browser
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol
from werkzeug import Response

from dtrain_dagster.web.guard import Guard, judge_request, rules_for
from dtrain_dagster.web.stored_secrets import secret_posted
from dtrain_dagster.web.third_party_uis import ui_rules
from tests.abuse import websites
from tests.abuse.planted_secrets import CARRIERS, secret_of
from tests.abuse.websites import JOB, LAUNCH, MUTATION, PARAMETERS, dagster_app, forged, own_page, send, served
from tests.e2e.chromium import chromium, in_a_browser, patient_page
from tests.e2e.conftest import BIN, ENDED, ROOT, Dagster, Project, make_project, start_dagster, stop_dagster, wait_for
from tests.leaks import leaks
from tests.loopback import LoopbackServer

UI = ui_rules(("dagster.lan",))
READ = rules_for("127.0.0.1")
MLFLOW = rules_for("127.0.0.1", most_body_bytes=None)
HERE = ("host", "127.0.0.1:3000")
JSON = ("content-type", "application/json")
LENGTH = ("content-length", "2")
SAME = (("origin", "http://127.0.0.1:3000"), ("sec-fetch-site", "same-origin"))
FOLLOWED = (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))

PASSED = {
    "the page": (UI, "GET", "/", "", [HERE, ("sec-fetch-site", "none")]),
    "its scripts": (UI, "GET", "/static/main.js", "", [HERE, ("sec-fetch-site", "same-origin")]),
    "its questions": (UI, "POST", "/graphql", "", [HERE, *SAME, JSON, LENGTH]),
    "with a character set": (
        UI, "POST", "/graphql", "", [HERE, *SAME, ("content-type", "application/json; charset=utf-8"), LENGTH],
    ),
    "a program": (UI, "POST", "/graphql", "", [HERE, JSON, LENGTH]),
    "another port by ssh": (
        UI, "POST", "/graphql", "", [("host", "localhost:8000"), ("origin", "http://localhost:8000"), JSON, LENGTH],
    ),
    "IPv6": (UI, "POST", "/graphql", "", [("host", "[::1]:3000"), ("origin", "http://[::1]:3000"), JSON, LENGTH]),
    "a name that was allowed, behind TLS": (
        UI, "POST", "/graphql", "", [("host", "Dagster.LAN"), ("origin", "https://dagster.lan"), JSON, LENGTH],
    ),
    "a link to a run": (UI, "GET", "/runs/8d6f", "", [HERE, *FOLLOWED]),
    "the page that asks GraphQL": (UI, "GET", "/graphql", "", [HERE, ("accept", "text/html,*/*")]),
    "Prometheus": (READ, "GET", "/metrics", "", [("host", "localhost:8060")]),
    "MLflow's artifacts": (MLFLOW, "PUT", "/api/2.0/x", "", [HERE, *SAME, ("content-type", "image/png")]),
}  # fmt: skip
REFUSED = {
    "no host": (UI, "GET", "/", "", [], 400),
    "two hosts": (UI, "GET", "/", "", [HERE, ("host", "evil.example")], 400),
    "no host that is one": (UI, "GET", "/", "", [("host", "127.0.0.1:3000/evil.example")], 400),
    "a rebound name": (UI, "GET", "/", "", [("host", "evil.example:3000")], 403),
    "a longer name": (UI, "GET", "/", "", [("host", "127.0.0.1.evil.example")], 403),
    "another address": (UI, "GET", "/", "", [("host", "192.168.1.7:3000")], 403),
    "a foreign origin": (UI, "POST", "/graphql", "", [HERE, JSON, LENGTH, ("origin", "https://evil.example")], 403),
    "another port": (UI, "POST", "/graphql", "", [HERE, JSON, LENGTH, ("origin", "http://127.0.0.1:8000")], 403),
    "a sandbox": (UI, "POST", "/graphql", "", [HERE, JSON, LENGTH, ("origin", "null")], 403),
    "an origin with a user": (
        UI, "POST", "/graphql", "", [HERE, JSON, LENGTH, ("origin", "http://127.0.0.1:3000@evil.example")], 403,
    ),
    "two origins": (UI, "POST", "/graphql", "", [HERE, JSON, LENGTH, *SAME, ("origin", "http://evil.example")], 400),
    "another site": (UI, "POST", "/graphql", "", [HERE, JSON, LENGTH, ("sec-fetch-site", "cross-site")], 403),
    "another port, by the browser's word": (UI, "GET", "/logs/x", "", [HERE, ("sec-fetch-site", "same-site")], 403),
    "an image": (UI, "GET", "/favicon.png", "", [HERE, ("sec-fetch-site", "cross-site")], 403),
    "a frame": (UI, "GET", "/", "", [HERE, *FOLLOWED[:2], ("sec-fetch-dest", "iframe")], 403),
    "a link that fills in a launchpad": (UI, "GET", "/x/playground/setup", "config=a", [HERE, *FOLLOWED], 403),
    "a link to GraphiQL": (UI, "GET", "/graphql", "", [HERE, *FOLLOWED, ("accept", "text/html")], 403),
    "a form that is sent to the page": (UI, "POST", "/", "", [HERE, LENGTH, JSON, *FOLLOWED], 403),
    "GraphQL by GET": (UI, "GET", "/graphql", "query=x", [HERE], 405),
    "GraphQL by GET, said to be a page": (UI, "GET", "/graphql", "query=x", [HERE, ("accept", "text/html")], 405),
    "with a slash": (UI, "GET", "/graphql/", "query=x", [HERE], 405),
    "with the end of a line, as routes take it": (UI, "GET", "/graphql\n", "query=x", [HERE], 400),
    "no type": (UI, "POST", "/graphql", "", [HERE, LENGTH], 415),
    "a form's type": (UI, "POST", "/graphql", "", [HERE, LENGTH, ("content-type", "text/plain")], 415),
    "JSON by the way": (
        UI, "POST", "/graphql", "", [HERE, LENGTH, ("content-type", "text/plain; application/json")], 415,
    ),
    "two types": (UI, "POST", "/graphql", "", [HERE, LENGTH, JSON, ("content-type", "text/plain")], 400),
    "GraphQL's own type": (UI, "POST", "/graphql", "", [HERE, LENGTH, ("content-type", "application/graphql")], 415),
    "a report without a type": (UI, "POST", "/report_asset_check/a", "", [HERE, LENGTH], 415),
    "asking for leave": (UI, "OPTIONS", "/graphql", "", [HERE], 405),
    "too long": (UI, "POST", "/graphql", "", [HERE, JSON, ("content-length", str(2**30))], 413),
    "no length": (UI, "POST", "/graphql", "", [HERE, JSON, ("transfer-encoding", "chunked")], 411),
    "no number": (UI, "POST", "/graphql", "", [HERE, JSON, ("content-length", "٣")], 411),
    "MLflow, from another port": (MLFLOW, "POST", "/api/x", "", [HERE, ("origin", "http://localhost:8000")], 403),
    "MLflow, a rebound name": (MLFLOW, "GET", "/", "", [("host", "evil.example:5000")], 403),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSED)
def test_own_pages_and_programs_pass(name: str):
    assert judge_request(*PASSED[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_other_websites_are_refused(name: str):
    *request, status = REFUSED[name]
    refused = judge_request(*request)
    assert refused is not None
    assert (refused.status, len(refused.reason) > 20) == (status, True)


def test_a_websocket_needs_the_origin_of_its_own_page():
    assert judge_request(UI, "GET", "/graphql", "", [HERE, *SAME], websocket=True) is None
    for headers in ([HERE], [HERE, ("origin", "http://evil.example")], [HERE, *SAME[:1], FOLLOWED[0]]):
        assert judge_request(UI, "GET", "/graphql", "", headers, websocket=True) is not None


def test_a_refusal_says_how_a_name_is_allowed():
    refused = judge_request(UI, "GET", "/", "", [("host", "trainer.lan:3000")])
    assert refused is not None
    assert "--allow-host trainer.lan" in refused.reason


def test_forged_requests_start_nothing():
    tally = websites.attack(Random("test"), rounds=12)
    assert tally.is_clean, tally.findings


def test_without_the_guard_the_same_requests_start_runs(tmp_path: Path):
    """What is refused above would not be harmless."""
    random = Random("test")
    with dagster_app(tmp_path) as (app, instance), served(app, websockets=True) as port:
        statuses = [send(port, forged(random, port)) for _ in range(10)]
        assert instance.get_runs()
    assert {101, 200} <= set(statuses)


def test_the_guard_lets_the_page_ask_and_subscribe(tmp_path: Path):
    with dagster_app(tmp_path) as (app, instance), served(Guard(app, ui_rules()), websockets=True) as port:
        url = f"http://127.0.0.1:{port}"
        assert send(port, own_page(port)) == 200
        asked = {"query": LAUNCH, "variables": json.dumps(PARAMETERS)}
        for path in ("/graphql", "/graphql/", "/graphql%0A", "/graphql%0a/"):
            requests.get(f"{url}{path}", params=asked, timeout=60)
        assert not instance.get_runs(), "whatever the path is written as, a GET launches nothing"
        websocket = websites.Request("GET", "/graphql", [
            ("Host", f"127.0.0.1:{port}"), ("Origin", url), ("Connection", "Upgrade"), ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("Sec-WebSocket-Protocol", "graphql-ws"),
        ])  # fmt: skip
        assert send(port, websocket) == 101
        answer = requests.get(url, timeout=30)
        assert (answer.status_code, answer.headers["x-frame-options"]) == (200, "SAMEORIGIN")
        launched = requests.post(f"{url}/graphql", json={"query": LAUNCH, "variables": PARAMETERS}, timeout=60)
        assert launched.json()["data"]["launchRun"]["__typename"] == "LaunchRunSuccess"
        assert len(instance.get_runs()) == 1
        with connect(
            f"ws://127.0.0.1:{port}/graphql", origin=Origin(url), subprotocols=[Subprotocol("graphql-ws")]
        ) as ws:
            ws.send(json.dumps({"type": "start", "id": "1", "payload": {"query": LAUNCH, "variables": PARAMETERS}}))
            assert json.loads(ws.recv(30))["type"] == "error"
        assert len(instance.get_runs()) == 1, "a websocket changes nothing"


def launch_with(config: object, **more: object) -> dict[str, object]:
    """Variables of `LAUNCH`."""
    return {"p": PARAMETERS["p"] | {"runConfigData": config} | more}


def launches(source: str) -> dict[str, tuple[str, object, str]]:
    """Ways to have Dagster store a text: the query, its variables, and the place that a refusal names."""
    config = {"ops": {"touch": {"config": {"source": source}}}}
    escaped = json.dumps(config).replace("/", "\\x2f")  # as YAML writes it
    tags = [{"key": "from", "value": source}]
    backfill = {"selector": {"partitionSetName": "a", "repositorySelector": {}}, "tags": tags}
    literal = (
        'mutation { launchRun(executionParams: {mode: "default", selector: {repositoryLocationName: "code.py", '
        f'repositoryName: "__repository__", pipelineName: "{JOB}"}}, '
        f"runConfigData: {{ops: {{touch: {{config: {{source: {json.dumps(source)}}}}}}}}}}}) {{ __typename }} }}"
    )
    default = (
        f"mutation($s: String! = {json.dumps(source)}) {{ addDynamicPartition(partitionKey: $s) {{ __typename }} }}"
    )
    several = "mutation($l: [ExecutionParams!]!) { launchMultipleRuns(executionParamsList: $l) { __typename } }"
    again = "mutation($p: ExecutionParams!) { launchRunReexecution(executionParams: $p) { __typename } }"
    backfilled = "mutation($b: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $b) { __typename } }"
    at = "ops.touch.config.source"
    return {
        "a document": (LAUNCH, launch_with(config), at),
        "YAML": (LAUNCH, launch_with(f"ops:\n  touch:\n    config:\n      source: '{source}'\n"), at),
        "YAML with escapes": (LAUNCH, launch_with(escaped), at),
        "variables that are a text": (LAUNCH, json.dumps(launch_with(config)), at),
        "a literal": (literal, None, at),
        "a variable's default": (default, None, "s carries"),
        "a tag": (LAUNCH, launch_with({}, executionMetadata={"tags": tags}), "executionMetadata.tags.0.value"),
        "several runs": (several, {"l": [launch_with({})["p"], launch_with(config)["p"]]}, at),
        "a run again": (again, launch_with(config), at),
        "a backfill": (backfilled, {"b": backfill}, "b.tags.0.value"),
    }


@pytest.mark.slow
def test_what_dagster_would_store_reaches_it_without_secrets_only(tmp_path: Path):
    """Without the guard's look the same requests leave them in Dagster's databases."""
    secret = secret_of(Random(7))
    sas = CARRIERS["sas"].format(secret)
    report = "/report_asset_materialization/a"
    reports: tuple[dict[str, Any], ...] = (
        {"json": {"metadata": {"from": sas}}},
        {"json": {}, "params": {"description": sas}},
    )
    with dagster_app(tmp_path) as (app, instance):
        with served(Guard(app, ui_rules())) as port:
            for form in CARRIERS.values():
                for name, (query, variables, where) in launches(form.format(secret)).items():
                    answer = post(port, "/graphql", json={"query": query, "variables": variables})
                    [error] = answer.json()["errors"]
                    assert answer.status_code == 400, name
                    assert where in error["message"], name
                    assert "env:NAME" in error["message"]
                    assert secret not in error["message"]
            assert [post(port, report, **sent).status_code for sent in reports] == [400, 400]
        assert instance.get_runs() == []
        assert not leaks([tmp_path], [secret])
        with served(Guard(app, replace(ui_rules(), look_through=None))) as port:
            for name in ("a document", "a tag"):
                query, variables, _ = launches(sas)[name]
                post(port, "/graphql", json={"query": query, "variables": variables})
            assert [post(port, report, **sent).status_code for sent in reports] == [200, 200]
        assert len(instance.get_runs()) == 2
        assert leaks([tmp_path], [secret])


def post(port: int, path: str, **sent: Any) -> requests.Response:
    return requests.post(f"http://127.0.0.1:{port}{path}", timeout=60, **sent)


@pytest.mark.parametrize(
    "source",
    ["env:PRICES", "keyvault://team-vault/prices", "https://example.org:8443/p.csv?version=1", "/data/a=1.csv"],
)
def test_what_carries_no_secret_passes(source: str):
    tried = launches(source)
    assert tried, "nothing would be shown"
    for query, variables, _ in tried.values():
        body = json.dumps({"query": query, "variables": variables}).encode()
        assert secret_posted("/graphql", "", body) is None


def test_questions_pass_and_deep_nests_do_not():
    """A question stores nothing, and the launchpad asks with every key that is pressed."""
    valid = "query($p: RunConfigData) { isPipelineConfigValid(runConfigData: $p) { __typename } }"
    typed = {"query": valid, "variables": {"p": {"a": CARRIERS["sas"].format("x")}}}
    assert secret_posted("/graphql", "", json.dumps(typed).encode()) is None
    for variables in ("[" * 9000 + "]" * 9000, "a: " + "[" * 20_000 + "]" * 20_000):
        body = json.dumps({"query": LAUNCH, "variables": {"p": variables}}).encode()
        assert "too deeply" in (secret_posted("/graphql", "", body) or "")
    rings = "a: &a [*a, *a]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]"
    body = json.dumps({"query": LAUNCH, "variables": {"p": rings}}).encode()
    assert secret_posted("/graphql", "", body) is None


@contextmanager
def command(project: Project, name: str) -> Iterator[str]:
    """A server of the command line on a free port: its address."""
    process = subprocess.Popen(
        [str(BIN / "dtrain"), "ui", name, "--port", "0"],
        cwd=ROOT, env=project.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield re.findall(r"http://[0-9.]+:[0-9]+", process.stdout.readline())[0]
    finally:
        process.terminate()
        assert process.wait(30) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path", "posted"),
    [("mlflow", "/ajax-api/2.0/mlflow/experiments/create", {"name": "planted"}), ("tensorboard", "/data/runs", None)],
)
def test_pages_of_others_are_guarded_as_well(tmp_path: Path, name: str, path: str, posted: dict[str, str] | None):
    """MLflow takes requests of any page of this machine by itself, and TensorBoard any name."""
    project = make_project(tmp_path / "home")
    with command(project, name) as url:
        assert requests.get(url, timeout=60).status_code == 200
        assert requests.get(url, headers={"Host": "evil.example"}, timeout=60).status_code == 403
        assert requests.get(url + path, headers={"Sec-Fetch-Site": "same-site"}, timeout=60).status_code == 403
        if posted is not None:
            for origin in ("http://localhost:8000", "http://evil.example", "null"):
                answer = requests.post(url + path, json=posted, headers={"Origin": origin}, timeout=60)
                assert answer.status_code == 403, origin
            assert requests.post(url + path, json=posted, headers={"Origin": url}, timeout=60).status_code == 200


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Project, psutil.Process]]:
    """A running `dtrain ui`: its address, its project and its process."""
    project = make_project(tmp_path_factory.mktemp("ui") / "home")
    server = start_dagster(project)
    try:
        yield server.url, project, psutil.Process(server.processes[0].pid)
    finally:
        stop_dagster(server)


@pytest.mark.slow
def test_nothing_else_of_the_ui_listens_where_others_reach_it(ui: tuple[str, Project, psutil.Process]):
    url, _, process = ui
    tree = [process, *process.children(recursive=True)]
    listening = [at for one in tree for at in one.net_connections("inet") if at.status == psutil.CONN_LISTEN]
    assert [f"http://{at.laddr.ip}:{at.laddr.port}" for at in listening] == [url]
    sockets = [Path(at.laddr) for one in tree for at in one.net_connections("unix") if str(at.laddr).startswith("/")]
    assert sockets
    for path in sockets:
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), "others may call a code server"
        if os.geteuid() == 0:
            assert connects_as(os.getuid(), path)
            assert not connects_as(65534, path)


def connects_as(user: int, path: Path) -> bool:
    code = (
        f"import os, socket; os.setgroups([]); os.setgid({user}); os.setuid({user})\n"
        f"try: socket.socket(socket.AF_UNIX).connect({str(path)!r})\nexcept PermissionError: raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0


EVIL_IS_HERE = "MAP *.example 127.0.0.1"
FOREIGN_PAGE = """<!doctype html><title>evil</title><script>
const ui = %(ui)s, query = %(query)s, json = %(json)s, told = [];
const tell = (name, what) => told.push([name, String(what)]);
async function attack() {
  const image = new Image();
  await new Promise(done => { image.onload = image.onerror = done; image.src = `${ui}/graphql?${query}`; });
  for (const type of ["text/plain", "application/x-www-form-urlencoded"])
    for (const mode of ["no-cors", "cors"])
      await fetch(`${ui}/graphql`, { method: "POST", mode, headers: { "content-type": type }, body: json })
        .then(answer => tell("fetch", answer.type + answer.status), error => tell("fetch", error));
  await fetch(`${ui}/graphql`, { method: "POST", headers: { "content-type": "application/json" }, body: json })
    .then(answer => tell("json", answer.status), error => tell("json", error));
  await fetch(`${ui}/graphql?${query}`, { mode: "no-cors" }).catch(() => 0);
  navigator.sendBeacon(`${ui}/graphql`, new Blob([json], { type: "text/plain" }));
  await new Promise(done => {
    const socket = new WebSocket(ui.replace("http", "ws") + "/graphql", "graphql-ws");
    socket.onopen = () => {
      tell("websocket", "open");
      socket.send(JSON.stringify({ type: "connection_init" }));
      socket.send(JSON.stringify({ type: "start", id: "1", payload: JSON.parse(json) }));
      setTimeout(done, 1000);
    };
    socket.onerror = () => { tell("websocket", "refused"); done(); };
  });
  for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.name = `frame-${type}`;
    const form = document.body.appendChild(document.createElement("form"));
    Object.assign(form, { method: "POST", action: `${ui}/graphql?${query}`, enctype: type, target: frame.name });
    form.append(Object.assign(document.createElement("input"), { name: json, value: "" }));
    form.submit();
    await new Promise(done => { frame.onload = done; setTimeout(done, 700); });
  }
  const rebound = `http://evil.localhost:${new URL(ui).port}`;
  await fetch(`${rebound}/graphql`, { method: "POST", mode: "no-cors", body: json }).catch(() => 0);
  return told;
}
</script><body>"""


@contextmanager
def foreign_site(ui_url: str) -> Iterator[int]:
    """A website with `FOREIGN_PAGE` on a port of its own."""
    values = {"ui": json.dumps(ui_url), "query": json.dumps(requests.models.PreparedRequest._encode_params(MUTATION)),
              "json": json.dumps(json.dumps({"query": LAUNCH, "variables": PARAMETERS}))}  # fmt: skip
    page = FOREIGN_PAGE
    for name, value in values.items():
        page = page.replace(f"%({name})s", value.replace("</", "<\\/"))

    with LoopbackServer(lambda _: Response(page, content_type="text/html")) as server:
        yield server.port


def attack_from(browser: Browser, ui_url: str, port: int) -> list[list[str]]:
    """Let pages of other sites attack the UI; what they saw. One of them has a name that points at this machine."""
    told = []
    for site in (f"http://evil.example:{port}", f"http://127.0.0.1:{port}", f"http://localhost:{port}"):
        page = patient_page(browser)
        page.goto(site)
        told += page.evaluate("attack()")
        page.wait_for_timeout(500)
        page.close()
    page = patient_page(browser)  # DNS rebinding: its own name, and by now the UI's address
    answer = page.goto(f"http://evil.example:{ui_url.rsplit(':', 1)[1]}/")
    told.append(["rebound", str(answer.status if answer else "")])
    sent = "body => fetch('/graphql', {method: 'POST', headers: {'content-type': 'application/json'}, body})"
    body = json.dumps({"query": LAUNCH, "variables": PARAMETERS})
    told.append(["rebound", str(page.evaluate(f"body => ({sent})(body).then(answer => answer.status)", body))])
    page.close()
    return told


@in_a_browser
def test_a_foreign_page_beside_dtrain_ui_launches_nothing(ui: tuple[str, Project, psutil.Process]):
    """The real thing, with the project's own code location and its daemon."""
    url, project, _ = ui
    with chromium(host_rules=EVIL_IS_HERE) as browser:
        with foreign_site(url) as site:
            told = attack_from(browser, url, site)
        assert ["websocket", "open"] not in told
        assert [what for name, what in told if name == "rebound"] == ["403", "403"]
        with dg.DagsterInstance.from_config(project.env["DAGSTER_HOME"]) as instance:
            assert instance.get_runs() == []
        page = patient_page(browser)
        page.goto(f"{url}/locations/dtrain/jobs/train")
        page.locator('button:has-text("Materialize all")').first.wait_for()


@pytest.mark.slow
def test_dtrain_ui_stores_no_secret_of_a_launchpad_and_launches_with_a_reference(
    ui: tuple[str, Project, psutil.Process],
):
    url, project, _ = ui
    secret = secret_of(Random(8))
    server = Dagster(project, int(url.rsplit(":", 1)[1]))
    for carrier in ("sas", "password"):
        source = CARRIERS[carrier].format(secret)
        for config in (source_of(source), json.dumps(source_of(source))):
            with pytest.raises(AssertionError, match=r"ops\.stock_prices\.config\.source carries"):
                server.launch("stock_prices", config=config)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"resources\.project\.config\.notify.*env:NAME"):
        server.launch(
            "stock_prices", config={"resources": {"project": {"config": {"notify": f"slack://a/b/{secret}"}}}}
        )
    assert not leaks([project.home], [secret])
    run_id = server.launch("stock_prices", config=source_of("env:NOT_SET"))
    try:
        with dg.DagsterInstance.from_config(project.env["DAGSTER_HOME"]) as instance:
            assert instance.get_run_by_id(run_id).run_config == source_of("env:NOT_SET")  # type: ignore[union-attr]
            wait_for(lambda: server.status(run_id) in ENDED, 120, "a run whose reference leads nowhere")
    finally:
        with dg.DagsterInstance.from_config(project.env["DAGSTER_HOME"]) as instance:
            instance.delete_run(run_id)


def source_of(address: str) -> dict[str, Any]:
    return {"ops": {"stock_prices": {"config": {"source": address}}}}


@pytest.mark.long
@pytest.mark.parametrize("guarded", [True, False])
@in_a_browser
def test_it_is_the_guard_that_a_foreign_page_fails_at(tmp_path: Path, guarded: bool):
    """The same page, with and without it: without it there are runs afterwards."""
    with dagster_app(tmp_path) as (app, instance):
        with served(Guard(app, ui_rules()) if guarded else app, websockets=True) as port:
            url = f"http://127.0.0.1:{port}"
            with foreign_site(url) as site, chromium(host_rules=EVIL_IS_HERE) as browser:
                told = attack_from(browser, url, site)
            assert send(port, own_page(port)) == 200
        assert bool(instance.get_runs()) is not guarded
    assert (["websocket", "open"] in told) is not guarded
    assert [what for name, what in told if name == "rebound"] == (["403", "403"] if guarded else ["200", "200"])

"""Other websites, open in the user's browser, against every server that the project starts.

The decision alone, as a matrix; and forged requests against Dagster's real web application, with the guard and without
it. A real Chromium with a foreign page beside a running `dtrain ui` is in `tests/e2e/test_whole_graph.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from dtrain_dagster.web.guard import Guard, judge_request, rules_for
from dtrain_dagster.web.stored_secrets import secret_posted
from dtrain_dagster.web.third_party_uis import ui_rules
from tests.abuse import websites
from tests.abuse.planted_secrets import CARRIERS, secret_of
from tests.abuse.websites import JOB, LAUNCH, PARAMETERS, dagster_app, forged, send, served
from tests.leaks import leaks

SITE = "Sec-Fetch-Site"
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


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dagster]:
    folder = tmp_path_factory.mktemp("dagster")
    with dagster_app(folder) as (app, instance):
        yield Dagster(folder, app, instance)


@dataclass
class Dagster:
    """Dagster's web application, in which a test counts the runs that were started."""

    folder: Path
    app: Any
    instance: Any

    def started(self) -> int:
        """How many runs there are; they are removed."""
        runs = self.instance.get_runs()
        for run in runs:
            self.instance.delete_run(run.run_id)
        return len(runs)


@pytest.mark.slow
def test_a_foreign_page_starts_nothing_and_it_is_the_guard_that_it_fails_at(dagster: Dagster):
    with served(Guard(dagster.app, ui_rules()), websockets=True) as port:
        statuses = {name: send(port, request) for name, request in forged(port).items()}
        assert {name: status for name, status in statuses.items() if status < 400} == {}
        assert dagster.started() == 0
        own = [("Host", f"127.0.0.1:{port}"), ("Origin", f"http://127.0.0.1:{port}"), (SITE, "same-origin")]
        page = websites.Request("POST", "/graphql", [*own, ("Content-Type", "application/json")], b'{"query": "{a}"}')
        assert send(port, page) == 400, "it is Dagster that answers"
    with served(dagster.app, websockets=True) as port:
        taken = {name for name, request in forged(port).items() if send(port, request) in (101, 200)}
    assert taken == {*forged(0)}
    assert dagster.started() == len(taken - {"a websocket", "a link"})  # the link opens a page with the mutation in it


def test_the_guard_lets_the_page_ask_and_subscribe(dagster: Dagster):
    with served(Guard(dagster.app, ui_rules()), websockets=True) as port:
        url = f"http://127.0.0.1:{port}"
        answer = requests.get(url, timeout=30)
        assert (answer.status_code, answer.headers["x-frame-options"]) == (200, "SAMEORIGIN")
        launched = requests.post(f"{url}/graphql", json={"query": LAUNCH, "variables": PARAMETERS}, timeout=60)
        assert launched.json()["data"]["launchRun"]["__typename"] == "LaunchRunSuccess"
        assert dagster.started() == 1
        with connect(
            f"ws://127.0.0.1:{port}/graphql", origin=Origin(url), subprotocols=[Subprotocol("graphql-ws")]
        ) as ws:
            ws.send(json.dumps({"type": "start", "id": "1", "payload": {"query": LAUNCH, "variables": PARAMETERS}}))
            assert json.loads(ws.recv(30))["type"] == "error"
        assert dagster.started() == 0, "a websocket changes nothing"


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


def test_what_dagster_would_store_reaches_it_without_secrets_only(dagster: Dagster):
    """Without the guard's look the same requests leave them in Dagster's databases."""
    secret = secret_of(Random(7))
    sas = CARRIERS["sas"].format(secret)
    report = "/report_asset_materialization/a"
    reports: tuple[dict[str, Any], ...] = (
        {"json": {"metadata": {"from": sas}}},
        {"json": {}, "params": {"description": sas}},
    )
    with served(Guard(dagster.app, ui_rules())) as port:
        for name, (query, variables, where) in launches(sas).items():
            answer = post(port, "/graphql", json={"query": query, "variables": variables})
            [error] = answer.json()["errors"]
            assert answer.status_code == 400, name
            assert where in error["message"], name
            assert "env:NAME" in error["message"]
            assert secret not in error["message"]
        assert [post(port, report, **sent).status_code for sent in reports] == [400, 400]
    assert dagster.started() == 0
    assert not leaks([dagster.folder], [secret])
    with served(Guard(dagster.app, replace(ui_rules(), look_through=None))) as port:
        for name in ("a document", "a tag"):
            query, variables, _ = launches(sas)[name]
            post(port, "/graphql", json={"query": query, "variables": variables})
        assert [post(port, report, **sent).status_code for sent in reports] == [200, 200]
    assert leaks([dagster.folder], [secret])
    assert dagster.started() == 2


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


def test_an_address_of_a_notice_is_refused_wherever_the_query_has_it():
    """Its token has no mark of its own: the field tells."""
    project = '{resources: {project: {config: {notify: "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"}}}}'
    query = f"mutation {{ launchRun(executionParams: {{runConfigData: {project}}}) {{ __typename }} }}"
    said = secret_posted("/graphql", "", json.dumps({"query": query}).encode())
    assert "resources.project.config.notify" in (said or "")


def test_questions_pass_and_deep_nests_do_not():
    """A question stores nothing, and the launchpad asks with every key that is pressed."""
    valid = "query($p: RunConfigData) { isPipelineConfigValid(runConfigData: $p) { __typename } }"
    typed = {"query": valid, "variables": {"p": {"a": CARRIERS["sas"].format("x")}}}
    assert secret_posted("/graphql", "", json.dumps(typed).encode()) is None
    for variables in ("[" * 9000 + "]" * 9000, "a: " + "[" * 1000 + "]" * 1000):
        body = json.dumps({"query": LAUNCH, "variables": {"p": variables}}).encode()
        assert "too deeply" in (secret_posted("/graphql", "", body) or "")
    rings = "a: &a [*a, *a]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]"
    body = json.dumps({"query": LAUNCH, "variables": {"p": rings}}).encode()
    assert secret_posted("/graphql", "", body) is None

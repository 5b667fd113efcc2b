"""MLflow's first page begins with trainings."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import FileResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from dtrain_dagster.web.mlflow_page import SCRIPT, BeginsWithTrainings, with_script


def test_the_first_page_has_the_script_and_no_other_does(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_bytes(b"<html><head><title>MLflow</title></head></html>")
    routes = [
        Route("/", lambda request: FileResponse(page), methods=["GET", "POST"]),
        Route("/other", lambda request: PlainTextResponse("<head>")),
    ]
    client = TestClient(BeginsWithTrainings(Starlette(routes=routes)))
    answer = client.get("/")
    assert answer.content == with_script(page.read_bytes())
    assert SCRIPT in answer.content
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "etag" not in answer.headers, "a browser that kept MLflow's own page would not ask for this one"
    assert client.get("/", headers={"if-none-match": "*"}).status_code == 200
    assert client.get("/other").text == "<head>"


def test_a_page_without_a_head_stays_as_it_is() -> None:
    assert with_script(b"<p>starting</p>") == b"<p>starting</p>"

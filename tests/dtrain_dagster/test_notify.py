"""Telling a person, by a real web hook on loopback."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from dtrain_dagster.notify import notify, tell


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"json://127.0.0.1:{server.server_port}/secret-token", heard
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_message_arrives_and_who_is_not_reached_stops_nobody(
    hook: tuple[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    url, heard = hook
    assert notify(["json://127.0.0.1:9/secret-token", "nonsense", url], "it starts", "3 nodes") == ("json", "nonsense")
    assert [(item["title"], item["message"]) for item in heard] == [("it starts", "3 nodes")]
    assert "nobody could be told" not in caplog.text
    tell([url, "nonsense"], "it starts", "3 nodes", logging.getLogger("of the run"))
    assert len(heard) == 2
    assert [record.message for record in caplog.records if record.name == "of the run"] == [
        "nobody could be told by nonsense; see DTRAIN_NOTIFY"
    ]
    assert "secret-token" not in caplog.text


def test_an_address_may_be_kept_as_a_secret(
    hook: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, heard = hook
    monkeypatch.setenv("HOOK_OF_OURS", url)
    assert notify(["env:HOOK_OF_OURS", "env:NOT_SET_AT_ALL"], "it starts", "3 nodes") == ("env",)
    assert len(heard) == 1
    assert notify([], "a", "b") == ()

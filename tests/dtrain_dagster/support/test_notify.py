"""Telling a person, by a real web hook on loopback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from dtrain_dagster.support.notify import notify, notify_and_log
from tests.webhook import web_hook

Hook = tuple[str, list[dict[str, Any]]]


@pytest.fixture
def hook() -> Iterator[Hook]:
    with web_hook() as (url, heard):
        yield f"{url}/secret-token", heard


def test_the_message_arrives_and_who_is_not_reached_stops_nobody(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    url, heard = hook
    assert notify(["json://127.0.0.1:9/secret-token", "nonsense", url], "it starts", "3 nodes") == ("json", "nonsense")
    assert [(item["title"], item["message"]) for item in heard] == [("it starts", "3 nodes")]
    assert "nobody could be notified" not in caplog.text
    notify_and_log([url, "nonsense"], "it starts", "3 nodes", logging.getLogger("of the run"))
    assert len(heard) == 2
    assert [record.message for record in caplog.records if record.name == "of the run"] == [
        "nobody could be notified by nonsense; see DTRAIN_NOTIFY"
    ]
    assert "secret-token" not in caplog.text


def test_an_address_may_be_kept_as_a_secret(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    url, heard = hook
    monkeypatch.setenv("HOOK_OF_OURS", url)
    assert notify(["env:HOOK_OF_OURS", "env:NOT_SET_AT_ALL"], "it starts", "3 nodes") == ("env",)
    assert len(heard) == 1
    assert notify([], "a", "b") == ()
    monkeypatch.setenv("HOOK_OF_OURS", f"{url} json://127.0.0.1:9/nobody {url}")
    assert notify(["env:HOOK_OF_OURS"], "it ends", "3 nodes") == ("env",), "one of them is not reached"
    assert [item["title"] for item in heard[1:]] == ["it ends", "it ends"]

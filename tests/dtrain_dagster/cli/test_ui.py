"""Pages that `dtrain ui --all` serves beside Dagster's: real processes on loopback."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dtrain_dagster.cli.ui import HOST, _served_beside
from dtrain_dagster.settings.environment import setting
from dtrain_dagster.web.server import address, listener

SETTING = "dashboard_url"


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


@pytest.mark.slow
def test_a_page_beside_dagsters_has_a_free_port_that_links_follow_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.delenv("DTRAIN_OPTIONS", raising=False)
    with listener(HOST, 0) as taken, _served_beside("jobs", taken.getsockname()[1], SETTING):
        url = setting(SETTING)
        assert url != address(taken)
        deadline = time.monotonic() + 60
        while not answers(url):
            assert time.monotonic() < deadline, f"nothing is served at {url}"
            time.sleep(0.2)
    assert not answers(url), "it ends with the block"


@pytest.mark.slow
def test_an_address_that_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_OPTIONS", f"{SETTING}=https://pages.example.org")
    with _served_beside("jobs", 0, SETTING):
        assert setting(SETTING) == "https://pages.example.org"

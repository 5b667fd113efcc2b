"""For all tests: no time limits inside them (machines are shared and noisy), and no settings from outside."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# A shell that starts pytest in the background has it ignore Ctrl-C, and so would every process that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests share a machine's cores, as workers and as worlds of processes: threads of torch that wait for each other would
# spin away most of them. Set before anything imports it, and inherited by all that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("dtrain", deadline=None)
settings.load_profile("dtrain")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` sets DTRAIN_HOME and DAGSTER_HOME; tests have homes of their own."""
    for name in list(os.environ):
        if name.startswith(("DTRAIN_", "DAGSTER_")) and name != "DTRAIN_SCREENSHOTS":
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left alone with one of them in the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)

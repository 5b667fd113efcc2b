"""Waiting for something in a test, with what was said in the error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


def wait_for(condition: Callable[[], Any], what: str, said: Callable[[], str] = str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    pytest.fail(f"waited {seconds:.0f} s in vain for {what}\n{said()}")

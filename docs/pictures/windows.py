"""What the scripts of this folder share: a browser, and the dashboard of this home."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

BIN = Path(sys.executable).parent


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a Chromium."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def dashboard() -> Iterator[str]:
    """Serve the dashboard of this home, and yield its address."""
    server = subprocess.Popen([BIN / "dtrain", "ui", "jobs", "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip().rpartition(" ")[2]
    finally:
        server.terminate()
        server.wait()

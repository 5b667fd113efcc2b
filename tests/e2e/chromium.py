"""The system's Chromium for browser tests; without one they skip and say so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = os.environ.get("DTRAIN_SCREENSHOTS")
"""A folder to leave screenshots in; the pictures of README and docs are made this way."""
BROWSER_TEST = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium"),
]


def in_a_browser(test: Any) -> Any:
    """Mark one test of a file whose others need no browser."""
    for mark in BROWSER_TEST:
        test = mark(test)
    return test


@contextmanager
def chromium(host_rules: str = "") -> Iterator[Browser]:
    """A browser, closed with the block. ``host_rules``: names that point elsewhere, as Chromium's option has them."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[*arguments, *([f"--host-resolver-rules={host_rules}"] if host_rules else [])],
        )
        yield browser
        browser.close()


def patient_page(browser: Browser, **options: Any) -> Page:
    """A page that waits long enough for what a machine renders that runs other tests as well."""
    page = browser.new_page(**options)
    page.set_default_timeout(120_000)
    return page


def shot(page: Page, name: str) -> None:
    if SHOTS:
        page.wait_for_timeout(1500)
        page.screenshot(path=Path(SHOTS) / f"{name}.png")

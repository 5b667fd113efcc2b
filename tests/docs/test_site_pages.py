"""Every page of the built site in a real browser, light and dark, narrow and wide: nothing is wider than the window, no
rule of axe is broken, nothing is missing, and no script fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Page

from tests.e2e.chromium import BROWSER_TEST, chromium, patient_page

pytestmark = [*BROWSER_TEST, pytest.mark.long, pytest.mark.timeout(3000)]

LEAST_PAGES = 25
"""Fewer would mean that pages are not found, and so are not looked at."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and prints nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served: axe reads style sheets, which a browser forbids between files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def faults_of(page: Page, address: str) -> list[str]:
    """Open an address, and return what is wrong with its page, in words."""
    from axe_playwright_python.sync_playwright import Axe

    faults: list[str] = []
    page.on("requestfailed", lambda request: faults.append(f"not loaded: {request.url}"))
    page.on("response", lambda got: faults.append(f"{got.status}: {got.url}") if got.status >= 400 else None)
    page.on("console", lambda message: faults.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))
    page.goto(address)
    faults += [f"wider than the window: {element}" for element in page.evaluate(CUT_OFF)]
    for item in Axe().run(page).response["violations"]:
        faults.append(f"axe {item['id']}: {item['nodes'][0]['html'][:200]}")
    return faults


CUT_OFF = """() => {
  const scrolls = each => ["auto", "scroll"].includes(getComputedStyle(each).overflowX);
  const hidden = each => !each.getClientRects().length;
  const within = each => each && each.tagName !== "ARTICLE" && (scrolls(each) || within(each.parentElement));
  const found = [...document.querySelectorAll("article *")].filter(
    each => !hidden(each) && each.getBoundingClientRect().right > window.innerWidth + 1 && !within(each));
  if (document.documentElement.scrollWidth > window.innerWidth) found.unshift(document.body);
  return found.slice(0, 3).map(each => each.outerHTML.slice(0, 120));
}"""
"""The first elements that reach out of the window and do not scroll by themselves: the theme cuts them off, so that the
page as a whole never scrolls."""


@pytest.mark.parametrize("width", [360, 1500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_whole(site: Path, address: str, scheme: Literal["light", "dark"], width: int):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= LEAST_PAGES
    found: dict[str, list[str]] = {}
    with chromium() as browser:
        for path in pages:
            page = patient_page(browser, color_scheme=scheme, viewport={"width": width, "height": 900})
            name = path.relative_to(site).as_posix()
            if faults := faults_of(page, f"{address}/{name}"):
                found[name] = faults
            page.close()
    assert found == {}

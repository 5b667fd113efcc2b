"""The documentation's site: it is built without a warning, its links lead somewhere, and it needs no network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.blocks import REFERENCE
from tests.e2e.chromium import CHROMIUM, chromium

pytestmark = pytest.mark.lint


class Targets(HTMLParser):
    """What a page links to and loads, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.anchors.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if tag in ("img", "script", "iframe", "source") and found.get("src"):
            self.loaded.append(str(found["src"]))
        if tag == "link" and found.get("href") and "stylesheet" in str(found.get("rel")):
            self.loaded.append(str(found["href"]))


@pytest.mark.slow
def test_all_links_and_files_of_the_site_are_there(site: Path):
    pages = {page.resolve(): Targets(page) for page in site.rglob("*.html")}
    assert len(pages) > 25
    broken = []
    for page, found in pages.items():
        for target in (*found.links, *found.loaded):
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "mailto"):
                assert target not in found.loaded, f"{page.name} loads {target} from a network"
                continue
            where = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = pages[where].anchors if where in pages else set()
            if not where.exists() or (parts.fragment and where.suffix == ".html" and parts.fragment not in anchors):
                broken.append(f"{page.relative_to(site)}: {target}")
    assert broken == []


@pytest.mark.slow
def test_addresses_of_other_sites_are_encrypted(site: Path):
    """They are not followed, as the tests have no network."""
    found = {link for page in site.rglob("*.html") for link in Targets(page).links if "://" in link}
    assert all(link.startswith("https://") or re.match(r"http://(127\.0\.0\.1|localhost)\b", link) for link in found)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium")
def test_pages_break_no_rule_of_accessibility(site: Path):
    """By axe, in a real browser, which loads nothing from a network. Colours are those of a theme, so that the dark one
    needs fewer pages; `test_site_pages` has all of both."""
    from axe_playwright_python.sync_playwright import Axe

    light = "index", "monitoring", "reference/settings"
    schemes: dict[Literal["light", "dark"], tuple[str, ...]] = {"light": light, "dark": ("tutorial",)}
    with chromium() as browser:
        for scheme, names in schemes.items():
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1300, "height": 900})
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            for name in names:
                page.goto((site / f"{name}.html").as_uri())
                found = Axe().run(page).response["violations"]
                assert [(item["id"], item["nodes"][0]["html"][:200]) for item in found] == [], (scheme, name)
            assert len(asked) > len(names)
            assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
            page.close()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium")
def test_the_search_of_a_site_that_is_a_folder_shows_the_lines_that_it_has_found(site: Path):
    """A browser lets no file read another, so that the search would list bare titles."""
    with chromium() as browser:
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{(site / 'search.html').as_uri()}?q=checkpoint")
        page.locator("#search-results p.context", has_text="checkpoint").first.wait_for()
        page.locator("#search-results li").nth(10).wait_for()  # they are listed one after the other
        assert wrong == []


@pytest.mark.parametrize("name", ["settings.md", "job.md", "launchpad.md"])
def test_every_field_has_a_meaning(name: str):
    rows = re.findall(r"^\| `.*$", (REFERENCE / name).read_text(), flags=re.MULTILINE)
    assert len(rows) > 20
    assert [row for row in rows if re.match(r"\| `[^|]*\|\s*\|", row)] == []


@pytest.mark.slow
def test_no_code_of_a_requirement_is_in_what_users_read(site: Path):
    for page in site.rglob("*.html"):
        assert not re.search(r"\b(R\d+\.\d+|D\d{1,2})\b", page.read_text().split("<article")[-1]), page.name

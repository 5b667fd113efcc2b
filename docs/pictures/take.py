"""Take the README's pictures of a running Dagster UI: ``make ui`` in one terminal, this script in another."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page
from windows import browser

HERE = Path(__file__).parent


def main(url: str) -> None:
    """Take all pictures from the UI at this address."""
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1500, "height": 900})
        page.goto(f"{url}/assets/trained_checkpoint?view=lineage&lineageScope=neighbors&lineageDepth=5")
        page.get_by_text("registered_model").first.wait_for()
        page.wait_for_timeout(4000)
        page.screenshot(path=HERE / "lineage.png")
        dialog(page, url, "trained_checkpoint", "more", "checkpoint.png")
        dialog(page, url, "performance_report", "more", "report.png")


def dialog(page: Page, url: str, asset: str, entry: str, file: str) -> None:
    """Take the picture behind a Markdown entry of an asset's metadata."""
    page.goto(f"{url}/assets/{asset}?view=overview")
    row = page.locator("tr", has=page.get_by_text(entry, exact=True)).first
    row.get_by_text("[Show Markdown]").click()
    page.locator('[role="dialog"] img').first.wait_for()
    page.wait_for_timeout(1000)
    page.screenshot(path=HERE / file)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:3000")

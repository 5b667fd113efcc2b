"""Take the picture of the graph in a running Dagster UI: ``make ui`` in one terminal, this script in another."""

from __future__ import annotations

import sys
from pathlib import Path

from windows import browser

HERE = Path(__file__).parent


def main(url: str) -> None:
    """Take it from the UI at this address."""
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1500, "height": 900})
        page.goto(f"{url}/assets/trained_checkpoint?view=lineage&lineageScope=neighbors&lineageDepth=5")
        page.get_by_text("registered_model").first.wait_for()
        page.wait_for_timeout(4000)
        page.screenshot(path=HERE / "lineage.png")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:3000")

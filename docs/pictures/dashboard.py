"""Take the pictures of a job's page and of the table of jobs: a real training of three nodes, of which node 1 is slow.
``python docs/pictures/dashboard.py``, in a home that has a dataset (after ``make run``); the name of such a job after
it takes that one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser
from windows import BIN, browser, dashboard

HERE = Path(__file__).parent
SIZE = {"width": 1280, "height": 800}
SLOW = [{"kind": "sleep", "at": "forward", "node": 1, "every": True, "seconds": 0.1}]
"""Node 1 waits this long in each micro-batch, as if its machine were slow."""


def train() -> str:
    """Train with a slow node, and return the job's name."""
    job = f"slow-{int(time.time())}"
    command = ["train", "--dataset", "latest", "--nodes", "3", "--epochs", "2", "--name", job]
    nodes = {**os.environ, "DTRAIN_FAULTS": json.dumps(SLOW)}
    subprocess.run([BIN / "dtrain", *command], env=nodes, check=True, stdout=subprocess.DEVNULL)
    return job


def main(job: str) -> None:
    """Take the pictures of a job that has ended."""
    with dashboard() as url, browser() as chromium:
        take(chromium, f"{url}jobs/{job}", "light", "", "dashboard.png")
        take(chromium, f"{url}jobs/{job}", "dark", "Where the time goes", "dashboard-dark.png")
        take(chromium, url, "light", "", "jobs.png", shown=job)


def take(chromium: Browser, url: str, theme: str, heading: str, file: str, shown: str = "node 1") -> None:
    """Take what a window shows in this theme, from this heading on. ``shown``: what has to be there first."""
    page = chromium.new_page(viewport=SIZE, color_scheme=theme)  # type: ignore[arg-type]
    page.goto(url)
    page.get_by_text(shown).first.wait_for()
    page.wait_for_timeout(4000)  # charts are drawn one after the other
    if heading:
        page.get_by_text(heading).evaluate("part => scrollTo(0, scrollY + part.getBoundingClientRect().top - 60)")
        page.wait_for_timeout(500)
    page.screenshot(path=HERE / file)
    page.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else train())

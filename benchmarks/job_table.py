"""Measure how long the table of all jobs takes with 1,000 run directories: the server's answers, and a real Chromium.

Run `python -m benchmarks.job_table`. The jobs are those of `benchmarks.dashboard_load`, and one of them is live and
gets events all the time; the server is `dtrain ui jobs` in a process of its own. A browser opens the page three
times: with the server just started, which then reads all run directories, and twice more.

    first_answer_seconds     the first answer with all jobs, from a server that has read none
    answer_seconds_p95       the whole table, from a server that has read them
    poll_seconds_p95         what has changed since two seconds ago, as an open page asks
    rows_of_a_poll_max       rows that such an answer has; wanted: those of jobs that live, 1
    figures_seconds          until verdict, losses and dollars of all jobs were read as well, behind the list
    page_bytes               HTML with the table in it, scripts and styles, as they are sent
    first_paint_seconds      of the page, as Chromium reports it, cold and warm
    rows_seconds             until the rows are drawn, cold and warm; wanted: below 1
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.dashboard_load import LiveJob, percentile, start_server, write_jobs
from benchmarks.host import tell

POLLS = 20
FILES = ("/", "/theme.js", "/dashboard.css", "/jobs.css", "/common.js", "/table_state.js", "/jobs.js")


def get(port: int, path: str) -> tuple[float, int, bytes]:
    """Return the seconds of an answer, its bytes as they were sent, and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.monotonic()
    connection.request("GET", path, headers={"Accept-Encoding": "gzip", "Sec-Fetch-Site": "same-origin"})
    answer = connection.getresponse()
    body = answer.read()
    took = time.monotonic() - began
    connection.close()
    whole = gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body
    return took, len(body), whole


def until_listed(port: int, jobs: int) -> float:
    """Return the seconds until an answer has all jobs."""
    began = time.monotonic()
    while True:
        table = json.loads(get(port, "/table.json")[2])
        if len(table["rows"]) >= jobs and not table["unread"]:
            return time.monotonic() - began
        time.sleep(0.02)


def until_figured(port: int, limit_seconds: float = 300.0) -> float:
    """Return the seconds until the figures of all jobs were read."""
    began = time.monotonic()
    while time.monotonic() - began < limit_seconds:
        if not any(row.get("unread") for row in json.loads(get(port, "/table.json")[2])["rows"]):
            return time.monotonic() - began
        time.sleep(0.5)
    raise TimeoutError("the figures were not read in time")


def paint(browser: Any, port: int) -> tuple[float, float]:
    """Return the seconds until Chromium has painted something of the page, and until the rows are drawn."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(f"http://127.0.0.1:{port}/")
    page.locator("#rows tr").first.wait_for()
    read = "name => (performance.getEntriesByName(name)[0] || {startTime: null}).startTime"
    found = []
    for name in ("first-contentful-paint", "rows"):
        while (at := page.evaluate(read, name)) is None:
            page.wait_for_timeout(20)
        found.append(at / 1000)
    page.close()
    return found[0], found[1]


def measure(jobs: int) -> dict[str, Any]:
    """Return the figures of one run; everything is made in a temporary folder and removed."""
    from playwright.sync_api import sync_playwright

    home = Path(tempfile.mkdtemp(prefix="dtrain-table-"))
    live = process = None
    try:
        folder = home / "storage" / "jobs"
        write_jobs(folder, jobs - 1, time.time())
        live = LiveJob(folder)
        process, port = start_server(home)
        first = until_listed(port, jobs)
        process.terminate()
        process.wait(30)
        with sync_playwright() as playwright:
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            process, port = start_server(home)
            painted = [paint(browser, port)]
            figures = until_figured(port)
            painted += [paint(browser, port) for _ in range(2)]
            browser.close()
        answers = [get(port, "/table.json") for _ in range(POLLS)]
        table = json.loads(answers[-1][2])
        polls, changed = [], []
        for _ in range(POLLS):
            time.sleep(2.0)
            took, _, body = get(port, f"/table.json?token={table['token']}&since={table['version']}")
            table = json.loads(body)
            polls.append(took)
            changed.append(len(table["rows"]))
        weights = [get(port, path)[1] for path in FILES]
        return {
            "jobs": jobs,
            "first_answer_seconds": round(first, 3),
            "answer_seconds_p50": round(statistics.median(took for took, _, _ in answers), 4),
            "answer_seconds_p95": round(percentile([took for took, _, _ in answers], 0.95), 4),
            "poll_seconds_p50": round(statistics.median(polls), 4),
            "poll_seconds_p95": round(percentile(polls, 0.95), 4),
            "rows_of_a_poll_max": max(changed),
            "figures_seconds": round(figures, 2),
            "page_bytes": sum(weights),
            "table_bytes": answers[-1][1],
            "first_paint_seconds": [round(paints, 3) for paints, _ in painted],
            "rows_seconds": [round(rows, 3) for _, rows in painted],
        }
    finally:
        if live is not None:
            live.ends.set()
            live.thread.join()
        if process is not None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(home, ignore_errors=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with these command-line arguments, and print its line of JSON."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.job_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000, help="synthetic jobs on disk (1000)")
    parser.add_argument("--save", action="store_true", help="also write it to benchmarks/results/job_table.json")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    tell("job_table", {**measure(options.jobs), "load_before": round(load_before, 2)}, options.save)


if __name__ == "__main__":
    main()

"""Many browsers and many jobs: everybody is answered, from one look at the disk, and memory stays as it is."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import psutil
import pytest
import requests

from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.server import build_app
from tests.abuse.dashboard_load import write_jobs
from tests.abuse.websites import served
from tests.dtrain_dagster.told_events import told, write_run

EVERY_SECONDS = 2.0
"""Seconds between two requests of a page."""


class Browser:
    """A page of the dashboard, without its drawing: the list of all jobs, and a job, of which one that has ended is
    asked for once in 20 s."""

    def __init__(self, url: str, job_id: str, every: int) -> None:
        self.url, self.job, self.every = f"{url}/", f"{url}/jobs/{job_id}.json", every
        self.statuses: list[int] = []
        self.tag = ""

    def look(self) -> None:
        answer = requests.get(self.url, headers={"If-None-Match": self.tag}, timeout=120)
        self.tag = answer.headers["etag"]
        if len(self.statuses) % self.every == 0:
            assert requests.get(self.job, timeout=120).status_code == 200
        self.statuses.append(answer.status_code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "browsers", "rounds"), [(200, 15, 2), pytest.param(10_000, 100, 20, marks=pytest.mark.long)]
)
def test_browsers_share_what_is_read(tmp_path: Path, jobs: int, browsers: int, rounds: int):
    write_jobs(tmp_path, jobs, time.time())
    write_run(tmp_path, "live", told(40))
    chance, memory = random.Random(0), []
    with served(build_app(JobBoard(str(tmp_path), "dedicated"))) as port:
        url = f"http://127.0.0.1:{port}"
        while "not read yet" in (page := requests.get(url, timeout=300).text):
            time.sleep(0.2)
        assert f"{jobs + 1:,} jobs" in page
        names = [path.name for path in chance.sample(sorted(tmp_path.iterdir()), browsers)]
        pages = [Browser(url, *(("live", 1) if number % 2 else (name, 10))) for number, name in enumerate(names)]
        for _ in range(rounds):
            looking = [threading.Thread(target=page.look) for page in pages]
            for thread in looking:
                thread.start()
                time.sleep(EVERY_SECONDS / browsers)
            for thread in looking:
                thread.join()
            memory.append(psutil.Process().memory_info().rss)
    statuses = [status for page in pages for status in page.statuses]
    assert len(statuses) == rounds * browsers
    assert set(statuses) == {200, 304}, "some had it already"
    assert memory[-1] - memory[0] < 64 << 20

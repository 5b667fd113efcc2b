"""The list of jobs: what is read again and what is not, and who is told that nothing is new."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import requests

from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.dashboard import job_board, job_index
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_index import JobIndex, Listing
from dtrain_dagster.dashboard.server import build_app
from dtrain_dagster.jobs.facts import DAMAGED, JobFacts
from tests.abuse.dashboard_load import write_jobs
from tests.abuse.websites import served
from tests.dtrain_dagster.told_events import START, told, write_run
from trainer.rundir import RunDir
from trainer.storage.base import StorageError
from trainer.storage.open import open_storage


class Counted:
    """Reads run directories as the board does, and notes which."""

    def __init__(self, jobs: Path) -> None:
        self.board, self.names = JobBoard(str(jobs), "dedicated"), list[str]()
        self.index = JobIndex(open_storage(str(jobs)), self.read, every_seconds=0.0)

    def read(self, name: str) -> tuple[JobFacts | None, float]:
        self.names.append(name)
        return self.board._row(name)

    def round(self) -> tuple[dict[str, str], list[str]]:
        """A new list: the state of each job, and what was read for it."""
        self.names.clear()
        self.index._done_at = -math.inf  # time goes by
        listing = self.index.listing()
        return {one.job_id: one.state for one in listing.rows}, sorted(self.names)


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were written this very moment are as good as old ones."""
    monkeypatch.setattr(job_index, "FRESH_SECONDS", 0.0)


def tell(jobs: Path, job_id: str, state: str) -> None:
    """As a cluster does."""
    ended_at = None if state == "running" else time.time()
    status = {"state": state, "started_at": 1.0, "ended_at": ended_at, "launch": 1}
    RunDir(f"{jobs}/{job_id}").write_json("status.json", status)


def test_only_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settle(monkeypatch)
    for name in ("a", "b"):
        write_run(tmp_path, name, told(1), state="succeeded")
    write_run(tmp_path, "live", told(1))
    (tmp_path / "stray.txt").write_text("no job")
    index = Counted(tmp_path)
    assert index.round()[0] == {"a": "succeeded", "b": "succeeded", "live": "running", "stray.txt": DAMAGED}
    assert set(index.round()[1]) <= {"stray.txt"}, "no cluster runs any of them, and nothing was written"
    RunDir(f"{tmp_path}/live").append_events(1, 0, 9, told(1, first=1))
    assert "live" in index.round()[1]
    tell(tmp_path, "live", "succeeded")
    states, read = index.round()
    assert (states["live"], "live" in read, "a" in read) == ("succeeded", True, False)
    tell(tmp_path, "a", "running")  # started again
    states, read = index.round()
    assert (states["a"], "a" in read, "b" in read) == ("running", True, False)
    tell(tmp_path, "a", "failed")
    assert index.round()[0]["a"] == "failed"
    open_storage(str(tmp_path)).delete("b")
    assert "b" not in index.round()[0]


def test_what_storage_kept_back_and_an_end_that_nobody_recorded_are_read_in_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settle(monkeypatch)
    write_run(tmp_path, "live", told(1))
    write_run(tmp_path, "cut", told(1)).storage.write("job.json", b"{")
    orphan = write_run(tmp_path, "orphan", told(1))  # its supervisor has died, and its nodes go on
    orphan.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "submitted_at": START})
    index = Counted(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(job_board, "status_here", Mock(side_effect=StorageError("503 Server Busy")))
        assert index.round()[0]["live"] == DAMAGED
    states, read = index.round()
    assert (states["live"], states["cut"]) == ("running", DAMAGED)
    assert (states["orphan"], read) == ("failed", ["cut", "live", "orphan"])
    for node in orphan.nodes():
        orphan.write_node(replace(node, last_seen_at=time.time() + 3600))
    before = {row.job_id: row.usd for row in index.index._listing.rows}
    assert index.round()[1] == ["orphan"]
    assert {row.job_id: row.usd for row in index.index._listing.rows}["orphan"] > before["orphan"] + 1
    tell(tmp_path, "orphan", "failed")
    index.round()
    assert index.round()[1] == []


def test_the_list_is_in_the_order_of_the_times_that_it_shows(tmp_path: Path):
    for name, began, launched in (("resumed", 1.0, 9.0), ("once", 5.0, 5.0)):
        rundir = write_run(tmp_path, name, told(1), state="succeeded")
        rundir.write_json("status.json", {"state": "succeeded", "started_at": launched, "ended_at": 99.0})
        rundir.write_node(replace(rundir.nodes()[0], started_at=began))
        for node in rundir.nodes()[1:]:
            rundir.write_node(replace(node, started_at=launched))
    rows = JobBoard(str(tmp_path), "dedicated").jobs()
    assert [(row.job_id, row.began_at) for row in rows] == [("once", 5.0), ("resumed", 1.0)]


@pytest.mark.parametrize("name", ["nodes/l0001-n000-s001.json", "plan.json"])
def test_one_damaged_file_takes_only_its_own_part_of_a_row_away(tmp_path: Path, name: str):
    rundir = write_run(tmp_path, "mine", told(3), state="failed")
    rundir.storage.write(name, b"{")
    (row,) = JobBoard(str(tmp_path), "dedicated").jobs()
    assert (row.state, row.model, row.step, row.usd) == ("failed", "tcn", 15, None)
    assert row.began_at == row.status.started_at is not None
    assert row.words.startswith("not all of it can be read: ")


def test_an_end_at_an_unknown_time_took_no_known_time():
    status = JobStatus(job_id="a", state=JobState.FAILED, started_at=1e9)
    assert JobFacts(status=status).seconds is None
    assert JobFacts(status=replace(status, ended_at=1e9 + 5)).seconds == 5


def test_a_write_in_the_same_tick_of_the_clock_is_not_missed(tmp_path: Path):
    write_run(tmp_path, "a", told(1), state="succeeded")
    index = Counted(tmp_path)
    index.round()
    path = tmp_path / "a/status.json"
    before, folder = path.stat(), (tmp_path / "a").stat()
    text = json.dumps(json.loads(path.read_text()) | {"state": "cancelled"})
    path.write_text(text.ljust(before.st_size)[: max(before.st_size, len(text))])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(tmp_path / "a", ns=(folder.st_atime_ns, folder.st_mtime_ns))
    assert index.round()[0] == {"a": "cancelled"}


def test_a_hundred_who_ask_cause_one_look(tmp_path: Path):
    write_jobs(tmp_path, 20, time.time())
    index, listings = Counted(tmp_path), list[Listing]()
    slow, index.index._every = threading.Event(), 3600.0
    read = index.index._read
    index.index._read = lambda name: read(name) if slow.wait(30) else (None, 0.0)
    asking = [threading.Thread(target=lambda: listings.append(index.index.listing())) for _ in range(100)]
    for thread in asking:
        thread.start()
    slow.set()
    for thread in asking:
        thread.join()
    assert (len(index.names), {len(listing.rows) for listing in listings}) == (20, {20})


def test_a_look_reads_for_its_time_and_the_next_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settle(monkeypatch)
    write_jobs(tmp_path, 20, time.time())
    index, read = Counted(tmp_path), list[str]()

    def slow(name: str) -> tuple[JobFacts | None, float]:
        time.sleep(0.05)
        read.append(name)
        return index.read(name)

    index.index._read = slow
    first = index.index.listing(0.12)
    assert 0 < len(first.rows) < 20
    assert len(first.rows) + first.unread == 20
    whole = index.index.listing()
    assert (len(whole.rows), whole.unread, len(set(read)), len(read)) == (20, 0, 20, 20)


def test_storage_that_cannot_be_listed_is_told_and_tried_again(tmp_path: Path):
    (tmp_path / "jobs").write_text("a file in its place")
    index = Counted(tmp_path / "jobs")
    for _ in range(2):
        with pytest.raises(OSError, match="jobs"):
            index.index.listing()
    (tmp_path / "jobs").unlink()
    listing = index.index.listing()
    assert (listing.version, listing.rows, listing.unread) == (1, (), 0), "that there is no job is known then"


def ask(url: str, **headers: str) -> requests.Response:
    return requests.get(url, headers=headers, timeout=30)


def test_large_answers_are_compressed_and_one_strange_job_is_a_row(tmp_path: Path):
    write_run(tmp_path, "long", told(300), state="succeeded")
    odd = write_run(tmp_path, "odd", told(1), state="succeeded")
    odd.storage.write("job.json", b'{"model": {"factory": "\\ud800<b>"}}')
    with served(build_app(JobBoard(str(tmp_path), "dedicated"))) as port:
        url = f"http://127.0.0.1:{port}"
        while "not read yet" in (page := ask(url).text):
            time.sleep(0.05)
        assert 'id="job-long"' in page
        assert "surrogate" in page[page.index('id="job-odd"') :]
        for path in ("jobs/long.json", "plotly.js"):
            small = ask(f"{url}/{path}", **{"Accept-Encoding": "gzip"})
            plain = ask(f"{url}/{path}", **{"Accept-Encoding": "identity"})
            assert small.headers["content-encoding"] == "gzip"
            assert "content-encoding" not in plain.headers
            # (Both hold when they were made, so the last digits of a number may differ.)
            assert abs(len(plain.content) - len(small.content)) < 32
            assert len(plain.content) > 100_000

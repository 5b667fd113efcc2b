"""The list of all jobs: what a row says, which rows an address asks for, and that hostile text stays text."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from told_events import HOSTILE, START, told, write_run

from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.dashboard.failure import end_in_words
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_index import Listing
from dtrain_dagster.dashboard.job_list import ROWS, chosen, jobs_page, list_page
from dtrain_dagster.dashboard.server import build_app
from dtrain_dagster.jobs.facts import JobFacts
from dtrain_dagster.jobs.totals import LaunchTotals
from tests.abuse.websites import served
from trainer.documents.schemas import LATEST
from trainer.rundir import RunDir


def row(job_id: str = "mine", state: str = "succeeded", usd: float | None = None, **more: Any) -> JobFacts:
    ended_at = None if state == "running" else 1e9 + 60
    status = JobStatus(job_id=job_id, state=JobState(state), started_at=1e9, ended_at=ended_at)
    totals = LaunchTotals(launches=1, seconds=90.0, node_hours=0.025, usd=usd)
    return JobFacts(**{"status": status, "model": "tcn", "began_at": 1e9, "step": 50, "totals": totals, **more})


@pytest.mark.parametrize(
    ("state", "status", "result", "words"),
    [
        ("failed", {"message": "rank 1 failed first\nTraceback…\nValueError: no"}, {}, "ValueError: no"),
        ("failed", {"message": "rank 1 failed first; the end of its log:\nbye"}, {}, "rank 1 failed first"),
        ("failed", {"message": "lost", "exit_code": 5}, {}, "lost"),
        ("failed", {"exit_code": -9}, {}, "failed: killed by SIGKILL"),
        ("failed", {}, {}, "No process was left to record how it ended"),
        ("failed", {"message": "lost"}, {"error": "loss is nan", "launch": 2}, "loss is nan"),
        ("failed", {"message": "lost"}, {"error": "of before", "launch": 1}, "lost"),
        ("failed", {}, {"status": "budget", "error": "1 h was paid"}, "stopped by its budget: 1 h was paid"),
        ("failed", {"message": "\x1b[2Jgone"}, {}, "\\x1b[2Jgone"),
        ("queued", {}, {}, "waits for nodes"),
        ("queued", {"message": "Resources"}, {}, "Resources"),
        ("cancelled", {}, {}, "somebody cancelled it"),
        ("succeeded", {"message": "done"}, {}, ""),
        (
            "running",
            {"message": "failed: rank 1\nits log", "kept": [{"node_id": 1, "until": 0.0, "how": "enter it"}]},
            {},
            "node 1 is kept until 00:00 UTC: enter it; failed: rank 1",
        ),
    ],
)
def test_an_end_is_one_line(state, status, result, words):
    assert end_in_words(state, status, result, {"launch": 2}) == words


def test_an_address_asks_for_the_jobs_that_have_its_words_live_ones_first():
    rows = [
        row("sweep-2"),
        row("sweep-1", "running"),
        row("other", words="ValueError in sweep"),
        row("failed", "failed"),
    ]
    assert [each.job_id for each in chosen(rows, "SWEEP", "")] == ["sweep-1", "sweep-2", "other"]
    assert [each.job_id for each in chosen(rows, "sweep valueerror", "")] == ["other"]
    assert [each.job_id for each in chosen(rows, "", "failed")] == ["failed"]
    assert jobs_page("http://127.0.0.1:8060/", "a b/c") == "http://127.0.0.1:8060/find/a%20b%2Fc"


def test_a_page_has_the_newest_rows_and_says_what_is_not_on_it():
    listing = Listing(1, tuple(row(f"job-{number}", usd=0.5) for number in range(ROWS + 5)))
    page = list_page(listing, "job", "succeeded", ROWS)
    assert page.count("<tr data-state") == ROWS
    assert f"{ROWS + 5} jobs, $52.50" in page
    assert "/?q=job&amp;state=succeeded&amp;n=200" in page
    assert "show more" not in list_page(listing, "job-17", "", ROWS)
    assert "No job matches." in list_page(listing, "nothing", "", ROWS)
    assert "There is no training yet." in list_page(Listing(1), "", "", ROWS)
    assert "Jobs are being read" in list_page(Listing(), "", "", ROWS), "not a word of none before the first look"
    cells = list_page(Listing(1, (row("mine"),)), "", "", ROWS)
    assert "2001-09-09 01:46" in cells
    assert "1 min 30 s" in cells, "over all launches"
    unknown = list_page(Listing(1, (JobFacts(status=JobStatus(job_id="mine", state=JobState.FAILED)),)), "", "", ROWS)
    assert "None" not in unknown


def test_a_time_of_the_year_10000_is_no_time_and_the_last_one_is_shown(tmp_path: Path):
    for name, at in (("last", LATEST), ("late", 253402300800.0)):
        write_run(tmp_path, name, told(1), state="failed")
        RunDir(f"{tmp_path}/{name}").write_json("status.json", {"state": "failed", "started_at": at, "ended_at": at})
        for node in RunDir(f"{tmp_path}/{name}").nodes():
            RunDir(f"{tmp_path}/{name}").write_node(replace(node, started_at=LATEST))
    listing = JobBoard(str(tmp_path), "dedicated").listing()
    assert {each.job_id: each.state for each in listing.rows} == {"last": "failed", "late": "damaged"}
    assert "9999-12-31" in list_page(listing, "", "", ROWS)


def listed(board: JobBoard) -> dict[str, JobFacts]:
    board._index._done_at = -1e9  # time goes by
    return {each.job_id: each for each in board.jobs()}


def test_a_row_has_the_dollars_of_its_nodes_without_those_of_its_probe(tmp_path: Path):
    """A probe is a job of its own in the list, whose sum has each dollar once."""
    rundir = write_run(tmp_path, "mine", told(3), state="succeeded")
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "node_count": 3, "submitted_at": START})
    node = {"sku": "Standard_NC6s_v3", "started_at": START, "ended_at": START + 600, "node_id": 0}
    rundir.write_json("plan.json", {"probes": [{"job_id": "probe-1", "usage": [node]}], "tier": "dedicated"})
    mine = listed(JobBoard(str(tmp_path), "dedicated"))["mine"]
    assert mine.usd == pytest.approx(9.18, abs=0.01), "three nodes, an hour, 3.06 dollars each"
    assert mine.words == ""


def test_a_page_is_served_once_for_all_and_what_is_hostile_stays_text(tmp_path: Path):
    write_run(tmp_path, "hostile", told(1), state="failed")
    status = {"state": "failed", "started_at": 1.0, "ended_at": 2.0, "message": HOSTILE, "launch": 1}
    RunDir(f"{tmp_path}/hostile").write_json("status.json", status)
    with served(build_app(JobBoard(str(tmp_path), "dedicated"))) as port:
        url = f"http://127.0.0.1:{port}"
        while "alert" not in (page := requests.get(url, timeout=30)).text:
            time.sleep(0.2)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert HOSTILE not in page.text
        assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page.text
        assert requests.get(url, headers={"If-None-Match": page.headers["etag"]}, timeout=30).status_code == 304
        for name in ("common.js", "jobs.js", "jobs.css", "jobs/hostile", "find/hostile"):
            assert requests.get(f"{url}/{name}", timeout=30).status_code == 200, name
        for query in ("n=-1", "n=9e9", "state=%00", "q=" + "x" * 10_000, "q=%3Cscript%3Ealert(1)"):
            asked = requests.get(f"{url}/?{query}", timeout=30)
            assert (asked.status_code, "<script>alert" in asked.text) == (200, False), query
        followed = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert requests.get(f"{url}/find/hostile", headers=followed, timeout=30).status_code == 200, (
            "a link of Dagster's"
        )

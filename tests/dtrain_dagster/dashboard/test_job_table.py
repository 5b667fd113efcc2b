"""The table of all jobs: what a row says, which jobs belong together, and what a page is told anew."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from told_events import HOSTILE, START, event, hang, told, write_run

from dtrain_dagster.dashboard import job_table
from dtrain_dagster.dashboard.job_board import JobBoard
from dtrain_dagster.dashboard.job_figures import (
    MOST_FILES,
    JobFigures,
    Verdict,
    failure_words,
    read_figures,
    verdict_of,
)
from dtrain_dagster.dashboard.job_groups import FleetGroups, group_of
from dtrain_dagster.dashboard.job_index import JobRow
from dtrain_dagster.dashboard.job_table import JobTable, KnownFigures, is_due, table_row
from dtrain_dagster.dashboard.server import build_app
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause
from tests.abuse.websites import served
from trainer.rundir import RunDir

SLOW = Diagnosis(cause=SlowdownCause.SLOW_INPUT, share=0.24, evidence="It reads slowly.", rank=1, node_id=1)
HEALTHY = Diagnosis(cause=SlowdownCause.HEALTHY, share=0.0, evidence="")
UNKNOWN = Diagnosis(cause=SlowdownCause.UNKNOWN, share=0.0, evidence="")
STUCK = Diagnosis(cause=SlowdownCause.HANG, share=1.0, evidence="It does not come.", rank=2, node_id=2)


def row(state: str = "succeeded", **more: Any) -> JobRow:
    known: dict[str, Any] = {"started_at": 1e9, "ended_at": None if state == "running" else 1e9 + 60, "step": 50}
    return JobRow(**{"job_id": "mine", "state": state, "model": "tcn", **known, **more})


@pytest.mark.parametrize(
    ("state", "found", "words", "tone"),
    [
        ("running", SLOW, "slow input on rank 1 (node 1), 24% of training time: It reads slowly.", "wait"),
        ("succeeded", SLOW, "slow input on rank 1 (node 1), 24% of training time: It reads slowly.", ""),
        ("running", STUCK, "hang of rank 2 (node 2), 100% of training time: It does not come.", "bad"),
        ("running", HEALTHY, "nothing holds the steps up", "good"),
        ("running", UNKNOWN, "too few steps were timed to say", ""),
        ("succeeded", UNKNOWN, "", ""),
        ("queued", UNKNOWN, "waits for nodes", "wait"),
        ("cancelled", SLOW, "somebody cancelled it", "wait"),
        ("failed", SLOW, "No process was left to record how it ended", "bad"),
    ],
)
def test_a_verdict_says_what_holds_a_job_up_or_why_it_ended(state, found, words, tone):
    assert verdict_of(row(state), {}, {}, {}, (), found) == Verdict(words=words, tone=tone)


def test_a_job_without_a_step_waits_for_it():
    assert verdict_of(row("running", step=None), {}, {}, {}, (), UNKNOWN).words == "waits for its first step"
    status = {"message": "failed: rank 1\nits log", "kept": [{"node_id": 1, "until": 0.0, "how": "enter it"}]}
    kept = verdict_of(row("running", step=None), status, {}, {}, (), UNKNOWN)
    assert kept == Verdict(words="node 1 is kept until 00:00 UTC: enter it; failed: rank 1", tone="bad")


@pytest.mark.parametrize(
    ("status", "result", "words"),
    [
        ({"message": "rank 1 failed first\nTraceback…\nValueError: no"}, {}, "ValueError: no"),
        ({"message": "lost", "exit_code": 5}, {}, "lost (exit code 5)"),
        ({"exit_code": -9}, {}, "No process was left to record how it ended (killed by SIGKILL)"),
        ({"message": "lost"}, {"error": "loss is nan", "launch": 2}, "loss is nan"),
        ({"message": "lost"}, {"error": "of before", "launch": 1}, "lost"),
        ({}, {"status": "budget", "error": "1 node-hour was paid"}, "stopped by its budget: 1 node-hour was paid"),
        ({"message": "\x1b[2Jgone"}, {}, "\\x1b[2Jgone"),
    ],
)
def test_a_failure_is_one_line(status, result, words):
    assert failure_words(status, result, {"launch": 2}, ()) == words


def test_a_row_leaves_out_what_is_not_known():
    unread = table_row(row(started_at=None, ended_at=None, step=None), None, {})
    assert unread == {"id": "mine", "state": "succeeded", "model": "tcn", "unread": True}
    figures = JobFigures(
        verdict=Verdict(words="fine", tone="good"), valid_loss=-2.0, usd=0.0, score=float("nan"), node_count=3
    )
    says = table_row(row("running"), figures, {})
    assert says == {
        "id": "mine", "state": "running", "live": True, "verdict": "fine", "tone": "good", "step": 50, "valid": -2.0,
        "usd": 0.0, "started": 1e9, "model": "tcn", "nodes": 3,
    }  # fmt: skip
    assert table_row(row(seconds=90.0), None, {})["seconds"] == 90.0
    damaged = table_row(row("damaged", reason="job.json is not an object"), None, {})
    assert (damaged["verdict"], "unread" in damaged) == ("job.json is not an object", False)


def test_figures_are_read_again_only_where_they_can_have_changed():
    ended, live = row(), row("running")
    known, of_live = KnownFigures(ended, JobFigures(), 0.0, 0.01), KnownFigures(live, JobFigures(), 0.0, 0.01)
    assert is_due(ended, None, 0.0, 1e6, 2.0)
    assert not is_due(ended, known, 1e6, 1e6, 2.0)
    failed = KnownFigures(ended, JobFigures(is_failed=True), 0.0, 0.1)
    assert is_due(ended, failed, 1e6, 1e6, 2.0), "storage may answer by now"
    assert is_due(row(ended_at=1e9 + 70), known, 0.0, 1e6, 2.0), "it was started again, and has ended again"
    assert not is_due(ended, known, 10.0, 60.0, 2.0)
    assert is_due(ended, known, 40.0, 60.0, 2.0), "its report may have come since"
    assert (is_due(live, of_live, 1.0, 0.0, 2.0), is_due(live, of_live, 3.0, 0.0, 2.0)) == (False, True)
    slow = KnownFigures(live, JobFigures(), 0.0, 1.0)
    assert not is_due(live, slow, 3.0, 0.0, 2.0), "what takes a second is not read every two"


def test_jobs_of_searches_fleets_and_studies_belong_together(tmp_path: Path):
    for fleet, names in (("sweep", ("sweep-0000", "sweep-0012")), ("nightly", ("nightly-small",))):
        (tmp_path / f"fleets/{fleet}/jobs").mkdir(parents=True)
        for name in names:
            (tmp_path / f"fleets/{fleet}/jobs/{name}.json").write_text("{}")
    (tmp_path / "searches/sweep").mkdir(parents=True)
    groups = FleetGroups(tmp_path)

    def told_of(job_id: str) -> tuple[str, str] | None:
        found = group_of(job_id, groups.read())
        return (found.key, found.label) if found else None

    assert told_of("sweep-0012") == ("search/sweep", "trial 12")
    assert told_of("nightly-small") == ("fleet/nightly", "small")
    assert told_of("probe-ed6c1e7a-3n") == ("probes/ed6c1e7a", "3 nodes")
    assert told_of("scaling-ab12-weak-2of3-40") == ("scaling-study/ab12", "weak-2of3")
    assert told_of("walk-0a1b2c-2008-1e486cdc") == ("walk-forward/0a1b2c", "test year 2008")
    assert told_of("train-6f66ac60-b41d1ccc") is told_of("sweep-0001") is None
    (tmp_path / "fleets/sweep/jobs/sweep-0001.json").write_text("{}")
    assert told_of("sweep-0001") == ("search/sweep", "trial 1"), "a job that was added later"
    assert FleetGroups(None).read() == FleetGroups(tmp_path / "none").read() == {}


def test_the_first_look_at_a_running_job_finds_an_evaluation_of_long_ago(tmp_path: Path):
    """Its newest files of events have none; later looks keep that of the look before."""
    rundir = write_run(tmp_path, "mine", [event("evaluation", START, split="valid", loss=-1.5, step=1, seconds=0.1)])
    for number in range(2 * MOST_FILES):
        rundir.append_events(1, 0, 2 + number, told(1, first=number))
    running = row(job_id="mine", state="running")
    first = read_figures(rundir, running, "dedicated", time.time())
    assert first.valid_loss == -1.5
    rundir.append_events(1, 0, 900, [event("evaluation", START + 900, split="test", loss=7.0, step=400, seconds=0.1)])
    assert read_figures(rundir, running, "dedicated", time.time(), first).valid_loss == -1.5


def test_figures_come_from_the_newest_events_and_the_records_of_the_end(tmp_path: Path):
    rundir = write_run(tmp_path, "mine", told(30), state="succeeded")
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "node_count": 3, "submitted_at": START})
    rundir.write_json(
        "result.json", {"status": "succeeded", "steps": 150, "best_valid_loss": -2.5, "test": {"loss": -2}}
    )
    ended = JobBoard(str(tmp_path), "dedicated").jobs()[0]
    figures = read_figures(rundir, ended, "dedicated", time.time())
    assert figures.verdict.words.startswith("slow input on rank 1 (node 1), 24% of training time")
    assert figures.valid_loss == -2.5
    assert (figures.score, figures.is_passed, figures.node_count) == (None, None, 3)
    model, gate = {"nll": -2.5, "loss": 9}, {"passed": True}
    rundir.write_json("evaluation.json", {"model": model, "baselines": {"a": {}}, "gate": gate})
    judged = table_row(ended, read_figures(rundir, ended, "dedicated", time.time()), {})
    assert (judged["score"], judged["metric"], judged["gate"], judged["nodes"]) == (-2.5, "NLL", "passed", 3)
    probe = table_row(replace(ended, job_id="probe-1"), read_figures(rundir, ended, "dedicated", time.time()), {})
    assert "gate" not in probe
    assert figures.usd == figures.usd_at_end == pytest.approx(9.18, abs=0.01), "three nodes, an hour, 3.06 dollars each"
    node = {"sku": "Standard_NC6s_v3", "started_at": START, "ended_at": START + 600, "node_id": 0}
    rundir.write_json("plan.json", {"probes": [{"job_id": "probe-1", "usage": [node]}], "tier": "dedicated"})
    again = read_figures(rundir, ended, "dedicated", time.time())
    assert again.usd == figures.usd, "a probe is a job of its own in the list, whose sum has each dollar once"
    diagnosis = {"cause": "checkpoint", "share": 0.4, "evidence": "Saves are slow.", "rank": None, "node_id": None}
    rundir.write_json("reports/performance_report.json", {"diagnosis": diagnosis})
    told_of = read_figures(rundir, ended, "dedicated", time.time()).verdict.words
    assert told_of == "checkpoint, 40% of training time: Saves are slow.", "the report knows all steps"
    rundir.write_json("reports/performance_report.json", {"diagnosis": diagnosis | {"cause": "of another version"}})
    assert read_figures(rundir, ended, "dedicated", time.time()).verdict == figures.verdict
    rundir.storage.write("nodes/l0001-n000-s001.json", b"{")
    assert "cannot be read" in read_figures(rundir, ended, "dedicated", time.time()).verdict.words


def test_a_running_job_has_its_dollars_so_far_and_at_the_end():
    """Without those of its probe in both, which is a job of its own in the list."""
    remote = f"memory://table-{time.time_ns()}/jobs"
    rundir, now = write_run(remote, "live", told(40)), time.time()
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "node_count": 3, "submitted_at": now})
    probe = {"node_id": 0, "sku": "Standard_NC6s_v3", "started_at": 0.0, "ended_at": 3600.0}
    plan = {
        "tier": "dedicated", "estimate": {"usd": {"expected": 20.0}}, "phases": {"finish": 60.0},
        "work": {"steps": 10_000, "evaluations": 0, "checkpoints": 0},
        "probes": [{"job_id": "probe", "usage": [probe]}],
    }  # fmt: skip
    rundir.write_json("plan.json", plan)
    (live,) = rows_of(JobTable(JobBoard(remote, "dedicated"), None)).values()
    assert live["usd"] == pytest.approx(3 * 3.06, abs=0.05), "three nodes, an hour each"
    left = 9800 * 0.2 / 3600 * 3 * 3.06 + 60 / 3600 * 3 * 3.06
    assert live["end"] - live["usd"] == pytest.approx(left, rel=0.1)
    assert (live["of"], live["live"]) == (10_000, True)


def test_a_running_job_has_the_verdict_of_its_own_page(tmp_path: Path):
    """It is the page's that changes slowly, so that no two pages contradict each other."""
    rundir = write_run(tmp_path, "live", told(10, slow=1))
    board = JobBoard(str(tmp_path), "dedicated")
    table = JobTable(board, None)
    opened = board.open("live", time.time())
    assert opened is not None
    shown = opened.snapshot(0, "", time.time())["verdict"]
    assert shown["title"].startswith("slow input on rank 1")
    rundir.append_events(1, 0, 2, told(60, slow=2, first=10))
    assert "rank 1" in rows_of(table)["live"]["verdict"]
    opened.shown_at -= 3600  # the page was closed an hour ago
    assert "rank 2" in rows_of(JobTable(board, None))["live"]["verdict"]


def test_a_hang_is_told_though_rank_0_is_silent(tmp_path: Path):
    rundir = write_run(tmp_path, "stuck", told(8))
    table = JobTable(JobBoard(str(tmp_path), "dedicated"), None)
    rundir.append_events(1, 1, 1, [hang(START + 60)])
    stuck = rows_of(table)["stuck"]
    assert (stuck["verdict"].partition(",")[0], stuck["tone"]) == ("hang", "bad")


def rows_of(table: JobTable) -> dict[str, dict[str, Any]]:
    """The whole table, with all figures."""
    table.answer("", 0, None)
    table.wait()
    return {each["id"]: each for each in json.loads(table.answer("", 0, None))["rows"]}


def test_a_page_is_told_what_has_changed_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = list[str]()

    def noted(rundir: RunDir, *more: Any) -> JobFigures:
        read.append(rundir.uri.rsplit("/", 1)[-1])
        return read_figures(rundir, *more)

    monkeypatch.setattr(job_table, "read_figures", noted)
    for name in ("a", "b", "c"):
        write_run(tmp_path, name, told(2), state="succeeded")
    board = JobBoard(str(tmp_path), "dedicated")
    table = JobTable(board, None)
    assert set(rows_of(table)) == {"a", "b", "c"}
    assert sorted(read) == ["a", "b", "c"]

    def ask(known: dict[str, Any]) -> dict[str, Any]:
        board._index._done_at = -1e9  # time goes by
        board.listing()
        table.wait()
        table.answer("", 0, None)
        table.wait()
        return json.loads(table.answer(known["token"], known["version"], None))

    first = json.loads(table.answer("", 0, None))
    second = ask(first)
    assert (second["whole"], second["rows"], second["gone"], second["version"]) == (False, [], [], first["version"])
    RunDir(f"{tmp_path}/b").write_json("status.json", {"state": "failed", "started_at": 1.0, "ended_at": 2.0})
    read.clear()
    third = ask(second)
    assert [(each["id"], each["state"]) for each in third["rows"]] == [("b", "failed")]
    assert set(read) == {"b"}
    board.storage.delete("a")
    fourth = ask(third)
    assert (fourth["rows"], fourth["gone"]) == ([], ["a"])
    assert ask(first)["gone"] == ["a"]
    another = json.loads(table.answer("another server", fourth["version"], None))
    assert (another["whole"], {each["id"] for each in another["rows"]}) == (True, {"b", "c"})


def test_a_page_that_has_missed_too_much_gets_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_table, "MOST_GONE", 2)
    for name in ("a", "b", "c", "d"):
        write_run(tmp_path, name, told(1), state="succeeded")
    board = JobBoard(str(tmp_path), "dedicated")
    table = JobTable(board, None)
    rows_of(table)
    first = json.loads(table.answer("", 0, None))
    for name in ("a", "b", "c"):
        board.storage.delete(name)
        board._index._done_at = -1e9
        rows_of(table)
    late = json.loads(table.answer(first["token"], first["version"], None))
    assert (late["whole"], [each["id"] for each in late["rows"]]) == (True, ["d"])


def test_pages_are_served_and_old_addresses_lead_on(tmp_path: Path):
    jobs = tmp_path / "storage/jobs"
    jobs.mkdir(parents=True)
    with served(build_app(JobBoard(str(jobs), "dedicated"), home=tmp_path)) as port:
        url = f"http://127.0.0.1:{port}"
        empty = requests.get(f"{url}/table.json", timeout=30).json()
        assert (empty["rows"], empty["whole"]) == ([], True)
        write_run(jobs, "hostile", [event("phase", START, name="startup", seconds=1.0)], state="failed")
        status = {"state": "failed", "started_at": 1.0, "ended_at": 2.0, "message": HOSTILE, "launch": 1}
        RunDir(f"{jobs}/hostile").write_json("status.json", status)
        while HOSTILE not in str(requests.get(f"{url}/table.json", timeout=30).json()):
            time.sleep(0.2)
        page = requests.get(url, timeout=30)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert HOSTILE not in page.text
        assert "\\u003c/script>\\u003cscript>alert(1)" in page.text
        for name in ("theme.js", "common.js", "table_state.js", "jobs.js", "jobs.css"):
            assert requests.get(f"{url}/{name}", timeout=30).status_code == 200, name
        assert requests.get(f"{url}/jobs/hostile", timeout=30).status_code == 200
        for query in ("since=-1", "since=9e9", "token=%00&since=99", "token=" + "x" * 10_000):
            assert requests.get(f"{url}/table.json?{query}", timeout=30).json()["whole"], query

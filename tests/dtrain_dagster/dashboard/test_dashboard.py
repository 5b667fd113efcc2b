"""What the page, the saved report, Prometheus and the terminal show of a job."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from told_events import HOSTILE, START, event, hang, membership, timing, told, write_run

from dtrain_dagster.cli.main import main
from dtrain_dagster.dashboard import page
from dtrain_dagster.dashboard.job_board import RECENT_JOBS, JobBoard, OpenJob, headline
from dtrain_dagster.dashboard.metrics import COUNTER_METRICS, METRICS, exposition
from dtrain_dagster.dashboard.series import MOST_NODES, POINTS, PerformanceDashboard
from dtrain_dagster.dashboard.server import build_app
from dtrain_dagster.jobs.facts import state_of
from dtrain_dagster.monitoring.windows import SEGMENTS
from tests.abuse import websites
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

ROOT = Path(__file__).parents[3]


def folded(events: list[dict[str, Any]]) -> PerformanceDashboard:
    board = PerformanceDashboard()
    board.take(events)
    return board


def opened(jobs: Path | str, job_id: str, now: float | None = None) -> OpenJob:
    job = JobBoard(str(jobs), "dedicated").open(job_id, time.time() if now is None else now)
    assert job is not None
    return job


# ---- the fold


def test_a_reader_that_asks_for_what_is_new_has_the_same_as_one_that_asks_for_all():
    """Also over steps that are done anew, and where rows were merged since the reader asked last."""
    events = told(900) + told(700, first=800) + told(40, first=1500)
    board, known, version, token = PerformanceDashboard(), {}, 0, ""
    for at in range(0, len(events), 431):
        board.take(events[at : at + 431])
        answer = board.changes(version, token)
        version, token = answer["version"], answer["token"]
        for name, change in answer["tracks"].items():
            known[name] = known.get(name, [])[: change["from"]] + change["rows"]
    assert known == {name: track.rows for name, track in board.tracks.items()}
    assert board.changes(version, token)["tracks"] == {}
    steps = [row["step"] for row in known["steps"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 5 * 1540


def test_a_long_training_takes_no_more_room_than_a_short_one():
    board = PerformanceDashboard()
    for first in range(0, 2500, 500):
        board.take(told(500, first=first))
    assert {len(track.rows) <= POINTS for track in board.tracks.values()} == {True}
    loss = board.tracks["steps"].rows
    assert loss[0]["step"] < 100 < 12_000 < loss[-1]["step"], "all of the training is still there"
    assert board.tracks["timing"].rows[-1]["forward"] == pytest.approx(50)


def test_the_straggler_is_who_waits_least():
    board = folded(told(30, slow=1))
    ranks = board.ranks()
    assert ranks is not None
    assert ranks["labels"] == ["node 0", "node 1", "node 2"]
    assert sum(values[0] for values in ranks["milliseconds"].values()) == pytest.approx(205)
    waiting = ranks["milliseconds"]["waiting"]
    assert min(waiting) == waiting[1]
    verdict = board.verdict({})
    assert verdict is not None
    assert verdict["title"].startswith("slow input on rank 1 (node 1)")


def test_ranks_of_an_older_generation_are_not_mixed_with_those_of_now():
    shrunk = timing(400, START + 99, slow=1)
    shrunk |= {"nodes": [0, 1], "segments": {name: values[:2] for name, values in shrunk["segments"].items()}}
    ranks = folded([*told(30), shrunk]).ranks()
    assert ranks is not None
    assert (ranks["labels"], ranks["steps"]) == (["node 0", "node 1"], 5)


def test_what_cannot_be_understood_takes_nothing_else_away():
    """Run directories of before, and events of a trainer that is newer."""
    strange = [
        event("timing", START + 50),
        event("timing", START + 50, step=1, steps=5, seconds=1, nodes=[0, 1], segments={"input": [1.0]}),
        event("link", START + 50, step=9),
        event("hologram", START + 50),
        event("node", START + 50, node_id="three"),
        {"kind": "step"},
    ]
    old = [item for item in told(10) if item["kind"] != "timing"]
    board = folded([*old, *strange])
    assert board.view.step == 50
    assert len(board.tracks["steps"].rows) == 10
    assert board.ranks() is None
    assert not board.windows


def test_every_column_that_a_chart_names_is_recorded():
    board = folded([*told(3, gpus=True), event("evaluation", START + 9, split="valid", loss=1.0, step=9)])
    names = {name: set().union(*(row.keys() for row in track.rows)) for name, track in board.tracks.items()}
    lines = re.findall(r'track: "([^"]+)", column: "(\w+)"', page.static("job_charts.js"))
    assert len(lines) == 6
    for track, column in lines:
        assert column in names[track.replace("*", "0")], f"{track}.{column}"
    assert set(SEGMENTS) <= names["timing"]


@pytest.mark.parametrize(
    ("status", "result", "launch", "state"),
    [
        ({}, {}, {"launch": 1}, "queued"),
        ({"state": "running"}, {"status": "failed", "launch": 1}, {"launch": 2}, "running"),
        ({"state": "running"}, {"status": "failed", "launch": 2}, {"launch": 2}, "failed"),
        ({"state": "running"}, {"status": "succeeded"}, {"launch": 2}, "succeeded"),
        ({"state": "cancelled"}, {"status": "succeeded"}, {"launch": 1}, "cancelled"),
        ({}, {}, None, "running"),
        ({}, {"status": "succeeded", "launch": 1}, None, "succeeded"),
        ({}, {"status": "stopped"}, None, "running"),
    ],
)
def test_the_cluster_has_the_last_word_on_how_a_job_stands(status, result, launch, state):
    """And the trainer where the cluster has not spoken it: nobody may look after the job any more."""
    assert state_of(status, result, launch) == state


# ---- the page


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, RunDir]]:
    """A real server on loopback over two jobs."""
    write_run(tmp_path, "older", told(5), state="succeeded")
    told_of = [
        *told(40, gpus=True),
        membership(2, START + 41, nodes=[0, 1], lost=[2], joined=[]),
        hang(START + 42),
        event("error", START + 43, message=HOSTILE, fatal=False),
    ]
    rundir = write_run(tmp_path, "newer", told_of)
    with serving(tmp_path) as url:
        yield url, rundir


@contextmanager
def serving(jobs: Path) -> Iterator[str]:
    with websites.served(build_app(JobBoard(str(jobs), "dedicated"))) as port:
        yield f"http://127.0.0.1:{port}"


def test_the_server_tells_what_is_new(served: tuple[str, RunDir]):
    url, rundir = served
    first = requests.get(f"{url}/jobs/newer.json", timeout=10).json()
    assert len(first["tracks"]["steps"]["rows"]) == 40
    figures = {figure["label"]: (figure["value"], figure["note"]) for figure in first["headline"]}
    assert figures["step"] == ("200", "of 10,000, epoch 1")
    assert figures["time left"][0].endswith(" to the last step"), "no plan says how long the finish takes"
    assert figures["nodes alive"] == ("2", "of 3, 1 lost"), "its process is there, and the others go on without it"
    assert first["loss"]["is_open"]
    assert first["loss"]["title"] == "Node 2 was lost"
    # three hours of a node at the plan's price; there is no launch.json that names a size
    assert figures["cost"] == ("–", "no price is known")
    assert [item["kind"] for item in first["news"]] == ["error", "hang", "membership"]

    rundir.append_events(1, 0, 2, told(2, first=40))
    rundir.write_json("launch.json", {"sku": "Standard_NC6s_v3", "submitted_at": START})
    time.sleep(1.1)  # how often it looks at local storage
    since = f"since={first['version']}&token={first['token']}"
    second = requests.get(f"{url}/jobs/newer.json?{since}", timeout=10).json()
    assert [row["step"] for row in second["tracks"]["steps"]["rows"]] == [205, 210]
    restarted = requests.get(f"{url}/jobs/newer.json?since=99&token=another", timeout=10).json()
    assert len(restarted["tracks"]["steps"]["rows"]) == 42
    figures = {figure["label"]: (figure["value"], figure["note"]) for figure in second["headline"]}
    assert figures["cost"][1] == "list price, not the bill"
    assert "took" in figures
    assert "time left" not in figures, "it has ended"
    assert second["job"]["state"] == "failed", "a local job without a supervisor runs no more, whatever its status says"


def test_a_pages_files_are_served_and_its_template_is_not(served: tuple[str, RunDir]):
    url, _ = served
    found = {
        name: requests.get(f"{url}/{name}", timeout=10) for name in ("job.js", "job.css", "job.html", "jobs/newer/")
    }
    assert [each.status_code for each in found.values()] == [200, 200, 404, 200]
    assert found["jobs/newer/"].url == f"{url}/jobs/newer", "an address with a slash at its end is the page's, too"
    assert all("default-src 'none'" in each.headers["content-security-policy"] for each in found.values())


def test_the_page_says_what_a_job_does_after_its_last_step(tmp_path: Path):
    rundir = write_run(tmp_path, "ends", told(4))
    rundir.write_json("plan.json", {"tier": "dedicated", "work": {"steps": 20}, "phases": {"finish": 40.0}})
    rundir.append_events(1, 0, 2, [event("finish", START + 10, stage="baselines")])
    job = opened(tmp_path, "ends", START + 20)
    shown = {figure["label"]: (figure["value"], figure["note"]) for figure in headline(job, START + 20)}
    assert shown["state"] == ("running", "fitting the baselines")
    assert shown["time left"][0] == "30 s"
    assert headline(job, START + 60)[2]["value"] == "–"


def test_the_server_answers_nobody_else(served: tuple[str, RunDir]):
    url, rundir = served
    (Path(rundir.uri).parent.parent / "job.json").write_text("{}")
    for path in ("jobs/..%2fjobs.json", "jobs/%2e%2e.json", "jobs/newer%2f..%2folder.json", "jobs/nobody.json"):
        assert requests.get(f"{url}/{path}", timeout=10).status_code == 404, path
    assert requests.get(f"{url}/metrics", headers={"Host": "evil.example"}, timeout=10).status_code == 403
    answer = requests.get(url, headers={"Origin": "http://evil.example"}, timeout=10)
    assert "access-control-allow-origin" not in answer.headers
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert requests.post(f"{url}/metrics", json={}, timeout=10).status_code == 405


def test_a_saved_report_needs_nothing_and_runs_nothing_but_its_own_scripts(served: tuple[str, RunDir]):
    _, rundir = served
    assert page.write_report(rundir, "dedicated") == f"{rundir.uri}/{page.REPORT}"
    html = rundir.storage.read(page.REPORT).decode()
    assert HOSTILE not in html
    assert "\\u003c/script>\\u003cscript>alert(1)" in html
    assert not re.search(r"<(?:script|link|img)[^>]* (?:src|href)=\"(?!data:)", html)
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    allowed = re.search(r"script-src ([^;\"]*)", html)
    assert allowed
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert allowed[1] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(scripts) == 5
    data = re.search(r'id="snapshot-data">(.*?)</script>', html, flags=re.DOTALL)
    assert data
    assert json.loads(data[1])["news"][0]["text"] == HOSTILE


@pytest.fixture
def remote() -> str:
    return f"memory://dashboard-{time.time_ns()}/jobs"


def test_a_job_that_nobody_looks_after_does_not_cost_for_ever(remote: str):
    rundir = write_run(remote, "alone", told(5))
    now = time.time()
    rundir.write_json("launch.json", {"launch": 1, "sku": "Standard_NC6s_v3", "submitted_at": now})
    rundir.write_node(NodePresence(node_id=0, launch=1, started_at=now - 7200, last_seen_at=now - 3600))
    for node in (1, 2):
        rundir.write_node(NodePresence(node_id=node, launch=1, started_at=now, last_seen_at=now))
    silent = opened(remote, "alone", now)
    assert silent.cost is not None
    assert (silent.nodes_alive(now), silent.row.usd) == (2, pytest.approx(3.06, abs=0.02)), "one hour, not two"
    rundir.write_json("result.json", {"status": "succeeded", "launch": 1, "steps": 25})
    (row,) = JobBoard(remote, "dedicated").jobs()
    assert (row.state, row.ended_at) == ("succeeded", pytest.approx(now))
    assert page.write_report(rundir, "dedicated") == f"{remote}/alone/{page.REPORT}"


def test_a_damaged_run_directory_takes_no_other_away(tmp_path: Path):
    damages = {
        "cut": {"status.json": b'{"state": "runn'},
        "list": {"job.json": b"[1]"},
        "date": {"status.json": b'{"state": "running", "started_at": "yesterday"}'},
        "infinite": {"status.json": b'{"state": "running", "started_at": Infinity}'},
        "node": {"nodes/l0001-n000-s001.json": b"{"},
        "events": {"status.json": b"{}", "events/g0001-r00000-000000.jsonl": b"", "nodes/x.json": b"[]"},
    }
    write_run(tmp_path, "sound", told(5))
    for name, files in damages.items():
        rundir = write_run(tmp_path, name, told(5))
        for file, data in files.items():
            rundir.storage.write(file, data)
    RunDir(str(tmp_path / "command")).write_json("launch.json", {"launch": 1})  # of `dtrain launch`: no training
    with serving(tmp_path) as url:
        metrics = requests.get(f"{url}/metrics", timeout=10).text
        answer = requests.get(f"{url}/jobs/cut.json", timeout=10)
    whole = {"sound": "running", "node": "running"}
    rows = JobBoard(str(tmp_path), "dedicated").jobs()
    assert {row.job_id: row.state for row in rows} == dict.fromkeys(damages, "damaged") | whole
    reasons = {row.job_id: row.words for row in rows}
    assert "job.json is damaged: it is not an object" in reasons["list"]
    assert "'started_at' is not a number" in reasons["date"]
    assert 'dtrain_step{job="sound"} 25.0' in metrics
    assert (answer.status_code, "cannot be read" in answer.text) == (500, True)


def test_a_deleted_job_is_gone(remote: str):
    for name in ("kept", "deleted"):
        write_run(remote, name, told(1), state="succeeded")
    board = JobBoard(remote, "dedicated")
    assert {row.job_id for row in board.jobs()} == {"kept", "deleted"}
    assert board.open("deleted", time.time())
    open_storage(remote).delete("deleted")
    board._index._done_at = -1e9  # time goes by
    board._open["deleted"]._read_at = -1e9
    assert board.open("deleted", time.time()) is None
    assert [row.job_id for row in board.jobs()] == ["kept"]
    assert list(board._open) == []


def test_remote_storage_is_asked_no_more_than_it_takes(remote: str, monkeypatch: pytest.MonkeyPatch):
    """Rows side by side; of a job that has ended only whether it was started again; nothing twice for /metrics."""
    for number in range(RECENT_JOBS + 2):
        write_run(remote, f"job-{number}", told(1), state="succeeded")
    board = JobBoard(remote, "dedicated")
    read, meet, count, asked = Storage.read, threading.Barrier(2), itertools.count(), list[str]()

    def noted(storage: Storage, name: str) -> bytes:
        asked.append(name)
        if next(count) < 2:
            meet.wait(10)
        return read(storage, name)

    monkeypatch.setattr(Storage, "read", noted)
    board.jobs()
    folds = {job.row.job_id: job for job in board.recent(time.time())}
    for number in range(RECENT_JOBS + 2):
        board.open(f"job-{number}", time.time())
    assert {job.row.job_id: job for job in board.recent(time.time())} == folds, "none was folded anew"
    job = folds.popitem()[1]
    job._read_at = -1e9  # time goes by
    asked.clear()
    job.refresh(time.time())
    assert asked == ["status.json"]
    job.rundir.write_json("status.json", {"state": "running", "started_at": START})
    job.rundir.append_events(1, 0, 2, told(1, first=1))
    job._read_at = -1e9
    assert (job.refresh(time.time()).row.state, job.dashboard.view.step) == ("running", 10)


# ---- Prometheus and Grafana


def test_metrics_are_of_nodes_that_are_there_and_survive_strange_figures(remote: str):
    """While they are read, nothing is folded in."""
    held = []

    class Cards(list):
        def __iter__(self):
            held.append(job.lock.locked())
            return super().__iter__()

    strange = [
        event("node", START + 8, node_id=0, cpu_percent=40.0, memory_percent=10**400),
        event("node", START + 8, node_id=1, cpu_percent=10**400, memory_percent=2.0, gpus=[{}]),
        event("step", START + 8, step=6, loss=10**400),
        event("step", 10**400, step=7),
        timing(30, START + 9, slow=1) | {"steps": 0},
        membership(2, START + 9, nodes=[0, 1], lost=[2], joined=[]),
    ]
    write_run(remote, "mine", told(5))
    board = JobBoard(remote, "dedicated")
    job = board.open("mine", time.time())
    assert job is not None
    job.dashboard.take(strange)  # from storage, the reader lets none of them pass
    job.dashboard.nodes[0]["gpus"] = Cards([{"index": 0, "utilization": 50.0}])
    metrics = exposition(board).decode()
    assert 'dtrain_node_cpu_utilization_ratio{job="mine",node="0"} 0.4' in metrics
    assert 'dtrain_node_memory_utilization_ratio{job="mine",node="1"} 0.02' in metrics
    assert re.findall(r'dtrain_node_cpu_utilization_ratio{job="mine",node="([12])"}', metrics) == []
    assert 'dtrain_gpu_utilization_ratio{gpu="0",job="mine",node="0"} 0.5' in metrics
    assert held
    assert all(held)
    assert job.snapshot(0, "", time.time())["ranks"]["steps"] == 25
    assert folded([timing(30, START, slow=1) | {"steps": 0}]).ranks() is None


def test_nodes_that_no_training_has_take_no_room():
    board = folded([event("node", START, node_id=node, cpu_percent=1.0) for node in range(MOST_NODES + 5)])
    assert (len(board.nodes), len(board.tracks)) == (MOST_NODES, MOST_NODES)


def test_metrics_follow_prometheus_conventions_and_feed_the_grafana_dashboard(served: tuple[str, RunDir]):
    url, _ = served
    answer = requests.get(f"{url}/metrics", timeout=10)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    values = {(one.name, *sorted(one.labels.values())): one.value for one in samples}
    assert values["dtrain_step", "newer"] == 200
    assert values["dtrain_job_info", "newer", "running", "tcn"] == 1
    assert values["dtrain_gpu_utilization_ratio", "0", "1", "newer"] == pytest.approx(0.89)
    assert values["dtrain_rank_lateness_seconds", "1", "1", "newer"] == pytest.approx(0.05)
    assert values["dtrain_nodes_lost_total", "newer"] == 1
    assert values["dtrain_hangs_total", "newer"] == 1
    recorded = {one.name for one in samples}
    assert not [name for name in recorded if re.search(r"percent|milli|_ms$|_gib", name)]
    declared = {*METRICS, *COUNTER_METRICS}
    assert declared - recorded == {"dtrain_validation_loss", "dtrain_cost_dollars"}, "not known of this job"

    grafana = json.loads((ROOT / "deploy/grafana/dtrain.json").read_text())
    queries = [target["expr"] for panel in grafana["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in grafana["templating"]["list"] if variable["type"] == "query"]
    for query in queries:
        names = re.findall(r"\bdtrain_\w+", query)
        assert names
        assert set(names) <= recorded | declared, query


# ---- the commands


def test_report_saves_a_file_and_refuses_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "storage" / "jobs", "mine", told(3), state="succeeded")
    done = CliRunner().invoke(main, ["status", "mine", "--html", "mine.html"])
    assert (done.exit_code, done.output) == (0, "mine.html\n")
    assert (tmp_path / "mine.html").stat().st_size > 4e6
    for arguments in (
        ["status", "other", "--html", "a"],
        ["status", "other", "--follow"],
    ):
        refused = CliRunner().invoke(main, arguments)
        assert refused.exit_code == 2, refused.output
        assert "no job 'other'; there are mine" in refused.output
    too_late = CliRunner().invoke(main, ["status", "mine", "--trace"])
    assert (too_late.exit_code, "only a running job can be traced" in too_late.output) == (2, True), too_late.output
    refused = CliRunner().invoke(main, ["status", "mine", "--html", "missing/mine.html"])
    assert refused.exit_code == 2
    assert "--html missing/mine.html" in refused.output

"""People are told once how a job has ended, by real supervisors and a real web hook on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug import Request, Response

from dtrain_dagster.clusters.base import OWNER, JobState
from dtrain_dagster.clusters.job_notices import tell_of_end, was_told
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.notice_claims import NOTICES
from dtrain_dagster.clusters.notice_text import (
    PART_OF,
    JobFigures,
    NoticeKind,
    describe_place,
    is_told,
    kind_of_end,
    write_notice,
)
from harness.waiting import until
from tests.loopback import LoopbackServer
from trainer.rundir import LAUNCH, STATUS, RunDir
from trainer.runtime.retry import RetryPolicy

FIGURES = JobFigures(launch=1, steps=1200, node_seconds=150.0, cost="$0.12 (stand-in)")


class Hook:
    """A receiver that may refuse; it is given as an address with a token, by reference."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.refusals = 0
        self.slow_seconds = 0.0

    def hear(self, request: Request) -> Response:
        if self.refusals:
            self.refusals -= 1
            return Response(status=503)
        self.heard.append(request.get_json())
        time.sleep(self.slow_seconds)
        return Response()

    @property
    def titles(self) -> list[str]:
        return [item["title"] for item in self.heard]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    made = Hook()
    with LoopbackServer(made.hear) as server:
        monkeypatch.setenv("HOOK_ADDRESS", f"json://127.0.0.1:{server.port}/very-secret-token")
        monkeypatch.setenv("DTRAIN_NOTIFY", "env:HOOK_ADDRESS")
        yield made


def settled(cluster, job_id: str, hook: Hook, count: int = 1) -> list[str]:
    """The titles heard once there are as many as expected, and nobody is left who could tell one too many."""
    until(lambda: len(hook.heard) >= count, "notices")
    until(lambda: cluster.processes() == [], "supervisors and reapers to end")
    return hook.titles


def ended_job(folder: Path, state: str = "failed") -> RunDir:
    rundir = RunDir(str(folder / "run"))
    rundir.write_json(LAUNCH, {"job_id": "job", "launch": 1, "node_count": 1, "sku": "Standard_NC6s_v3", "env": {}})
    rundir.write_json(
        STATUS,
        {"job_id": "job", "state": state, "message": "rank 0 failed\nits log", "launch": 1, "started_at": 1.0,
         "ended_at": 2.0, "exit_code": 1, "pid": 1},
    )  # fmt: skip
    return rundir


def test_what_is_told_of_each_end() -> None:
    budget = {"status": "budget", "launch": 2}
    assert kind_of_end(JobState.SUCCEEDED, {}, 1) == "finished"
    assert kind_of_end(JobState.FAILED, budget, 2) == "budget"
    assert kind_of_end(JobState.FAILED, budget, 3) == "failed", "the budget stopped an earlier launch"
    assert kind_of_end(JobState.CANCELLED, {}, 1) is None
    assert kind_of_end(JobState.RUNNING, {}, 1) is None
    assert write_notice("finished", "a", FIGURES) == (
        "dtrain: a has finished",
        "1,200 steps; 2 min 30 s of nodes, $0.12 (stand-in)\ndtrain logs a",
    )
    title, body = write_notice("goes_on", "a", JobFigures(launch=2, place="1 x A100", node_seconds=5, cost="$1"))
    assert title == "dtrain: a goes on: launch 2"
    assert body.splitlines() == [
        "on 1 x A100, from the latest checkpoint",
        "so far: 5 s of nodes in 2 launches, $1",
        "dtrain logs --follow a",
        "dtrain cancel a",
    ]


@pytest.mark.slow
def test_the_end_is_told_when_nobody_follows_the_job(cluster, hook: Hook) -> None:
    """No process looks: the reaper tells, after the submitter has left the job to itself."""
    cluster.submit("good", "")
    assert settled(cluster, "good", hook) == ["dtrain: good has finished"]
    cluster.submit("bad", "print('token'); sys.exit(3 if RANK else 0)")
    assert settled(cluster, "bad", hook, 2)[1:] == ["dtrain: bad has failed"]
    said = hook.heard[1]["message"]
    assert "rank 1 on node 1 failed first" in said
    assert "dtrain logs bad" in said
    assert "$" in said
    assert "secret" not in json.dumps(hook.heard)
    cluster.submit("probe-1", "")
    cluster.wait("probe-1")
    cluster.submit("unwanted", "time.sleep(60)")
    cluster.manager.cancel_job("unwanted")
    until(lambda: cluster.processes() == [], "supervisors and reapers to end")
    assert len(hook.heard) == 2, "nobody is told of a probe, nor of what somebody cancelled"
    for name in ("good", "bad"):
        files = list((cluster.run_dir(name) / NOTICES).iterdir())
        assert [json.loads(file.read_text())["state"] for file in files] == ["sent"]
        assert "very-secret" not in "".join(file.read_text() for file in files)


@pytest.mark.slow
def test_a_budget_and_another_launch_are_told(cluster, hook: Hook) -> None:
    """The second launch is the supervisor's own, the third a person's."""
    script = """
    import json
    HOME, LAUNCH = OUT / "home" / "storage" / "jobs" / "job", int(os.environ["DTRAIN_LAUNCH"])
    if LAUNCH == 1:
        sys.exit(75)
    if LAUNCH == 2:
        result = {"status": "budget", "error": "the budget is spent", "launch": 2}
        (HOME / "result.json").write_text(json.dumps(result))
        sys.exit(77)
    (HOME / "result.json").write_text(json.dumps({"status": "succeeded", "steps": 12}))
    """
    cluster.submit("job", script, nodes=1, elastic=True)
    assert sorted(settled(cluster, "job", hook, 2)) == [
        "dtrain: job goes on: launch 2",
        "dtrain: job was stopped by its budget",
    ]
    [stopped] = [item["message"] for item in hook.heard if "budget" in item["title"]]
    assert stopped.splitlines()[0] == "the budget is spent"
    cluster.submit("job", script, nodes=2, elastic=True)
    assert sorted(settled(cluster, "job", hook, 4)[2:]) == [
        "dtrain: job goes on: launch 3",
        "dtrain: job has finished",
    ]
    [moved] = [item["message"] for item in hook.heard if "launch 3" in item["title"]]
    assert moved.startswith("on 2 x Standard_NC6s_v3, from the latest checkpoint\n")
    [finished] = [item["message"] for item in hook.heard if "finished" in item["title"]]
    assert "12 steps; " in finished
    assert "in 3 launches" in finished


@pytest.mark.slow
def test_a_dead_supervisor_is_told_by_its_reaper_and_by_who_finds_both_dead(cluster, hook: Hook) -> None:
    for name, both in (("one", False), ("both", True)):
        cluster.submit(name, "(OUT / f'up-{RANK}').touch(); time.sleep(600)", nodes=1)
        cluster.wait_for_file("up-0").unlink()
        supervisor = cluster.status_file(name)["pid"]
        if both:
            reaper = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(reaper, signal.SIGKILL)
        os.kill(supervisor, signal.SIGKILL)
        if both:
            assert len(hook.heard) == 1
            other = LocalClusterManager(cluster.manager.home)
            until(lambda other=other: other.job_status("both").state is JobState.FAILED, "its end")
        expected = [f"dtrain: {given} has failed" for given in ("one", "both")[: 1 + both]]
        assert settled(cluster, name, hook, 1 + both) == expected
        assert "the supervisor died" in hook.heard[-1]["message"]


@pytest.mark.slow
def test_several_processes_tell_it_once(tmp_path: Path, hook: Hook) -> None:
    rundir = ended_job(tmp_path)
    program = "import sys; from dtrain_dagster.clusters.job_notices import tell_of_end\n"
    program += (
        "from trainer.rundir import RunDir\nprint(flush=True)\nsys.stdin.read(1); tell_of_end(RunDir(sys.argv[1]))"
    )
    command, pipe = [sys.executable, "-c", program, rundir.uri], subprocess.PIPE
    several = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=dict(os.environ)) for _ in range(3)]
    for process in several:
        assert process.stdout is not None
        process.stdout.readline()  # each waits for a letter
    for process in several:
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.close()
    assert [process.wait(60) for process in several] == [0] * 3
    tell_of_end(rundir)
    assert hook.titles == ["dtrain: job has failed"]
    assert was_told(rundir, "end")
    assert not was_told(rundir, "end", 2)


def test_what_was_refused_is_sent_again_and_what_may_have_arrived_is_not(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = ended_job(tmp_path)
    hook.refusals = 2
    monkeypatch.setenv("DTRAIN_NOTIFY", "env:HOOK_ADDRESS env:NOBODY_SET_THIS")
    tell_of_end(rundir)
    assert hook.heard == []
    tell_of_end(rundir, RetryPolicy(first_pause_seconds=0.01, max_attempts=3))
    assert hook.titles == ["dtrain: job has failed"], "and not again for the address that nobody can read"
    other = ended_job(tmp_path / "other")
    hook.slow_seconds = 6.0  # Apprise waits four
    monkeypatch.setenv("DTRAIN_NOTIFY", "env:HOOK_ADDRESS")
    for _ in range(2):
        tell_of_end(other, RetryPolicy(first_pause_seconds=0.01, max_attempts=3))
    assert len(hook.heard) == 2


def test_a_claim_without_an_outcome_is_never_repeated(tmp_path: Path, hook: Hook) -> None:
    rundir = ended_job(tmp_path)
    rundir.storage.write(f"{NOTICES}/l1-end.json", b"")  # its sender may have died after it was sent
    tell_of_end(rundir)
    assert hook.heard == []


def test_the_notice_has_links(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = ended_job(tmp_path, "succeeded")
    monkeypatch.setenv("DTRAIN_DASHBOARD_URL", "https://runs.example/dtrain/")
    monkeypatch.setenv("DTRAIN_DAGSTER_URL", "https://dagster.example")
    run_id = "b41d1ccc-7629-4b3c-86dc-27b31d506b42"
    rundir.write_json(OWNER, {"dagster_run_id": run_id})
    tell_of_end(rundir)
    [notice] = hook.heard
    assert notice["message"].splitlines()[-2:] == [
        "https://runs.example/dtrain/jobs/job",
        f"https://dagster.example/runs/{run_id}",
    ]


def test_a_link_that_a_node_has_written_is_not_sent(tmp_path: Path, hook: Hook) -> None:
    rundir = ended_job(tmp_path, "succeeded")
    launch = rundir.read_json(LAUNCH) or {}
    rundir.write_json(LAUNCH, launch | {"studio_url": "javascript:alert(1)"})
    rundir.write_json(OWNER, {"dagster_run_id": "../../elsewhere"})
    tell_of_end(rundir)
    [notice] = hook.heard
    assert notice["message"].splitlines()[-1] == "http://127.0.0.1:8060/jobs/job"
    assert "elsewhere" not in notice["message"]
    assert "javascript" not in notice["message"]


def test_what_is_told_of_the_jobs_of_fleets_and_searches() -> None:
    kinds: tuple[NoticeKind, ...] = ("finished", "failed", "budget", "goes_on", "waits")
    for part, expected in (("", kinds), ("fleet", ("finished", "failed", "waits")), ("search", ())):
        env = {PART_OF: part} if part else {}
        assert tuple(kind for kind in kinds if is_told(kind, "a", env)) == expected
    assert not is_told("failed", "probe-1", {})


def test_where_a_launch_runs() -> None:
    place = {"engine": "azure_ml", "cluster_name": "a", "sku": "V100", "node_count": 3, "tier": "spot"}
    assert describe_place(place) == "3 x V100 (Spot) of azure_ml a"
    assert describe_place({"engine": "local", "sku": "V100", "node_count": 1}) == "1 x V100"


def test_nothing_is_claimed_where_nobody_is_to_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTRAIN_NOTIFY", raising=False)
    rundir = ended_job(tmp_path)
    tell_of_end(rundir)
    assert rundir.storage.list(NOTICES) == []

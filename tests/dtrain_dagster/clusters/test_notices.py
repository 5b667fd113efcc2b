"""People are told once how a job has ended, by real supervisors and a real web hook on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from werkzeug import Request, Response

from dtrain_dagster.clusters import notices
from dtrain_dagster.clusters.base import OWNER, JobState
from dtrain_dagster.clusters.notices import (
    NOTICES,
    NoticeKind,
    describe_place,
    is_told,
    kind_of_end,
    tell,
    was_told,
    write_notice,
)
from harness.waiting import until
from tests.loopback import LoopbackServer
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, RESULT, STATUS, RunDir
from trainer.runtime.launch import with_order
from trainer.runtime.retry import RetryPolicy


class Hook:
    """A receiver that may refuse; it is given as an address with a token, by reference."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.refusals = 0

    def hear(self, request: Request) -> Response:
        if self.refusals:
            self.refusals -= 1
            return Response(status=503)
        self.heard.append(request.get_json())
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


def ended_job(folder: Path, state: str = "failed", name: str = "run") -> RunDir:
    rundir = RunDir(str(folder / name))
    rundir.write_json(LAUNCH, {"job_id": "job", "launch": 1, "node_count": 1, "sku": "Standard_NC6s_v3", "env": {}})
    rundir.write_json(
        STATUS,
        {"job_id": "job", "state": state, "message": "rank 0 failed\nits log", "launch": 1, "started_at": 1.0,
         "ended_at": 2.0, "exit_code": 1, "pid": 1},
    )  # fmt: skip
    return rundir


@pytest.mark.parametrize(
    ("state", "result", "launch", "kind"),
    [
        (JobState.SUCCEEDED, {}, 1, "finished"),
        (JobState.FAILED, {"status": "budget", "launch": 2}, 2, "budget"),
        (JobState.FAILED, {"status": "budget", "launch": 2}, 3, "failed"),  # the budget stopped an earlier launch
        (JobState.CANCELLED, {}, 1, None),
        (JobState.RUNNING, {}, 1, None),
    ],
)
def test_what_is_told_of_each_end(state: JobState, result: dict[str, Any], launch: int, kind: str | None) -> None:
    assert kind_of_end(state, result, launch) == kind


def test_a_notice_has_steps_node_time_dollars_and_what_to_do(tmp_path: Path) -> None:
    rundir = ended_job(tmp_path, "succeeded")
    rundir.write_json(RESULT, {"status": "succeeded", "steps": 1200})
    rundir.write_node(NodePresence(node_id=0, launch=1, started_at=0.0, ended_at=150.0))
    title, text = write_notice(rundir, "finished", rundir.read_json(LAUNCH) or {})
    assert title == "dtrain: job has finished"
    paid, log, page = text.splitlines()
    assert paid.startswith("1,200 steps; 2 min 30 s of nodes, $0.1275 (stand-in")
    assert (log, page) == ("dtrain logs job", "http://127.0.0.1:8060/jobs/job")


@pytest.mark.slow
def test_a_supervisor_tells_the_end_itself(cluster, hook: Hook) -> None:
    cluster.submit("one", "sys.exit(3)", nodes=1)
    until(lambda: hook.heard, "the notice, though nobody looks")
    assert hook.titles == ["dtrain: one has failed"]
    [file] = (cluster.run_dir("one") / NOTICES).iterdir()
    assert "secret" not in json.dumps(hook.heard) + file.read_text()


def test_a_supervisor_that_is_dead_is_told_once_by_who_finds_it(cluster, hook: Hook) -> None:
    rundir = ended_job(cluster.manager.folder, "running", "job")
    for _ in range(2):
        assert cluster.manager.job_status("job").state is JobState.FAILED
    [heard] = hook.heard
    assert "the supervisor died" in heard["message"]
    assert was_told(rundir, "end")


def test_several_who_see_the_end_tell_it_once(tmp_path: Path, hook: Hook) -> None:
    rundir = ended_job(tmp_path)
    several = [threading.Thread(target=tell, args=(RunDir(rundir.uri),)) for _ in range(3)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    tell(rundir)
    assert hook.titles == ["dtrain: job has failed"]
    assert was_told(rundir, "end")


def test_another_launch_and_nodes_that_are_kept_are_told_with_what_to_do(tmp_path: Path, hook: Hook) -> None:
    rundir = ended_job(tmp_path, "running")
    kept = {"node_id": 1, "until": 1_800_000_000.0, "how": "srun --jobid=7 --pty bash"}
    rundir.write_json(STATUS, (rundir.read_json(STATUS) or {}) | {"kept": [kept]})
    tell(rundir, "kept", 1)
    assert hook.heard[0]["message"].splitlines()[:2] == [
        "rank 0 failed", "node 1 is kept until 08:00 UTC: srun --jobid=7 --pty bash",
    ]  # fmt: skip
    rundir.write_json(LAUNCH, (rundir.read_json(LAUNCH) or {}) | {"launch": 2, "node_count": 3})
    assert not was_told(rundir, "kept"), "of the last launch"
    tell(rundir, "goes_on", 1)
    tell(rundir, "goes_on", 2)
    assert hook.titles[1:] == ["dtrain: job goes on: launch 2"], "of a launch that is over nothing is told"
    assert hook.heard[1]["message"].startswith("on 3 x Standard_NC6s_v3, from the latest checkpoint\n")


def test_what_was_refused_is_sent_again_and_what_may_have_arrived_is_not(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = ended_job(tmp_path)
    hook.refusals = 2
    monkeypatch.setenv("DTRAIN_NOTIFY", "env:HOOK_ADDRESS env:NOBODY_SET_THIS")
    tell(rundir)
    assert hook.heard == []
    tell(rundir, retries=RetryPolicy(first_pause_seconds=0.01, max_attempts=3))
    assert hook.titles == ["dtrain: job has failed"], "and not again for the address that nobody can read"
    other = ended_job(tmp_path / "other")
    hook.refusals = 9
    monkeypatch.setenv("DTRAIN_NOTIFY", "env:HOOK_ADDRESS")
    monkeypatch.setattr(notices, "REFUSED_WITHIN_SECONDS", 0.0)  # as if the answer had not come in time
    for _ in range(2):
        tell(other, retries=RetryPolicy(first_pause_seconds=0.01, max_attempts=3))
    assert hook.refusals == 8


def test_a_claim_without_an_outcome_is_never_repeated(tmp_path: Path, hook: Hook) -> None:
    rundir = ended_job(tmp_path)
    rundir.storage.write(f"{NOTICES}/l1-end.json", b"")  # its sender may have died after it was sent
    tell(rundir)
    assert hook.heard == []


def test_the_notice_has_links(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = ended_job(tmp_path, "succeeded")
    monkeypatch.setenv(
        "DTRAIN_OPTIONS", "dashboard_url=https://runs.example/dtrain/ dagster_url=https://dagster.example"
    )
    run_id = "b41d1ccc-7629-4b3c-86dc-27b31d506b42"
    rundir.write_json(OWNER, {"dagster_run_id": run_id})
    tell(rundir)
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
    tell(rundir)
    [notice] = hook.heard
    assert notice["message"].splitlines()[-1] == "http://127.0.0.1:8060/jobs/job"
    assert "elsewhere" not in notice["message"]
    assert "javascript" not in notice["message"]


def test_what_is_told_of_the_jobs_of_fleets_and_searches() -> None:
    kinds: tuple[NoticeKind, ...] = ("finished", "failed", "budget", "goes_on", "waits")
    for part, expected in (("", kinds), ("fleet", ("finished", "failed", "waits")), ("search", ())):
        env = with_order({}, part_of=part)
        assert tuple(kind for kind in kinds if is_told(kind, "a", env)) == expected
    assert not is_told("failed", "probe-1", {})


def test_where_a_launch_runs() -> None:
    place = {"engine": "azure_ml", "cluster_name": "a", "sku": "V100", "node_count": 3, "tier": "spot"}
    assert describe_place(place) == "3 x V100 (Spot) of azure_ml a"
    assert describe_place({"engine": "local", "sku": "V100", "node_count": 1}) == "1 x V100"


def test_nothing_is_claimed_where_nobody_is_to_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTRAIN_NOTIFY", raising=False)
    rundir = ended_job(tmp_path)
    tell(rundir)
    assert rundir.storage.list(NOTICES) == []

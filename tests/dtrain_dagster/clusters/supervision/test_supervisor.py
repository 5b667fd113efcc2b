"""What a supervisor does when nodes end, wait or are kept, and what it says of it: on nodes of the test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.exit_policy import PlacedNode
from dtrain_dagster.clusters.supervision.placer import Placer
from dtrain_dagster.clusters.supervision.supervisor import Supervisor
from trainer.documents.presences import NodePresence
from trainer.node.environment import LaunchError
from trainer.rundir import LAUNCH, RESULT, STATUS, RunDir
from trainer.runtime.clock import SteadyClock

DONE = {"status": "succeeded"}
Look = Callable[[int, int, int, int], "tuple[str, int | None]"]
"""State and exit code of a node: by launch, node, incarnation, and how often it was looked at."""


class Scripted(Placer):
    """Nodes that do what a function says."""

    poll_seconds = 0.001

    def __init__(self, rundir: RunDir, clock: SteadyClock, look: Look) -> None:
        super().__init__(rundir, SimpleNamespace(), clock)  # type: ignore[arg-type]
        self.script = look
        self.started: list[tuple[int, int, int]] = []
        self.looks: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        self.ended: set[int] = set()
        self.unstartable: set[int] = set()

    def begin_launch(self, launch: Mapping[str, Any]) -> None:
        self.launch, self.incarnations = launch, {}
        self.ended.clear()

    def start(self, node_id: int, incarnation: int) -> None:
        self.started.append((self.launch["launch"], node_id, incarnation))
        if incarnation in self.unstartable:
            raise LaunchError("there is no such program")
        self.incarnations[node_id], self.looks[node_id] = incarnation, 0

    def look(self) -> Mapping[int, PlacedNode]:
        return {node_id: self._node(node_id, incarnation) for node_id, incarnation in self.incarnations.items()}

    def _node(self, node_id: int, incarnation: int) -> PlacedNode:
        self.looks[node_id] += 1
        state, code = self.script(self.launch["launch"], node_id, incarnation, self.looks[node_id])
        if node_id in self.ended and code is None:
            state, code = "gone", -signal.SIGTERM
        times = {"launch": 1, "started_at": 1.0, "kept_since": 2.0, "kept_until": 3.0}
        return PlacedNode(
            presence=NodePresence(node_id=node_id, **times) if state == "kept" else None,
            node_id=node_id, incarnation=incarnation, codes=(code,), state=state, reason="(Resources)",  # type: ignore[arg-type]
            gone_seconds=60.0 if state == "gone" else None, queued_at=self.clock.now() if state == "pending" else None,
        )  # fmt: skip

    def end(self, node_ids: Iterable[int], grace: float) -> None:
        self.ended.update(node_ids)

    def sweep(self, seconds: float) -> None:
        pass

    def how_to_enter(self, node_id: int) -> str:
        return f"enter {node_id}"


class Job:
    """A job and its end."""

    def __init__(self, folder: Path, look: Look, nodes: int, result: Mapping[str, Any] | None) -> None:
        self.rundir = RunDir(str(folder))
        launch = {
            "job_id": "one", "token": "ab" * 24, "launch": 1, "node_count": nodes, "processes_per_node": 1,
            "env": {"DTRAIN_STOP_GRACE_SECONDS": "0.05"},
            "elastic": True, "max_replacements": 2, "replacement_delay_seconds": 0.0,
        }  # fmt: skip
        self.rundir.write_json(LAUNCH, launch)
        if result is not None:
            self.rundir.write_json(RESULT, dict(result))
        self.news: list[tuple[str, int]] = []
        clock = SteadyClock.begin()
        self.placer = Scripted(self.rundir, clock, look)
        self.supervisor = Supervisor(self.rundir, self.placer, clock, lambda *news: self.news.append(news))

    def run(self) -> dict[str, Any]:
        state = self.supervisor.run()
        status = self.rundir.read_json(STATUS) or {}
        assert status["state"] == state
        return status


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}

    def job(look: Look, nodes: int = 2, result: Mapping[str, Any] | None = None) -> Job:
        return Job(tmp_path, look, nodes, result)

    yield job
    for number, handler in before.items():
        signal.signal(number, handler)


def ended(*codes: int) -> Look:
    """Every launch of them ends so, by node."""
    return lambda launch, node, incarnation, looks: ("gone", codes[node])


@pytest.mark.parametrize(
    ("codes", "said", "code", "launches"),
    [
        ((75,), "the nodes could not regroup, and starting them again did not help (node 0: exit code 75, lost", 75, 4),
        ((-9, -9), "starting them again did not help (node 0: killed by SIGKILL; node 1: killed by SIGKILL)", 137, 4),
        ((143, -15), "evicted: all nodes were told to stop (SIGTERM)", 143, 1),
        ((0, 0), "the result does not say that the training is complete", 1, 1),
        ((-9, 2), "rank 1 on node 1 failed first (exit code 2, unusable", 2, 1),
        ((0, 1), "rank 1 on node 1 failed first (exit code 1); the end of its log:\nno such column", 1, 1),
    ],
)
def test_why_a_job_has_failed(
    make: Callable[..., Job], codes: tuple[int, ...], said: str, code: int, launches: int
) -> None:
    job = make(ended(*codes), len(codes))
    path = job.rundir.storage.local_path("logs/node-1.log")
    path.parent.mkdir(parents=True)
    path.write_text("no such column\n")
    job.rundir.write_json("checkpoints/LATEST.json", {"path": "checkpoints/g0001-s000000040", "step": 40})
    status = job.run()
    assert (status["state"], status["exit_code"], status["launch"]) == ("failed", code, launches)
    assert said in status["message"]
    if "first" not in said:
        kept = f"The checkpoint of step 40 is kept in {job.rundir.uri}/checkpoints/g0001-s000000040"
        assert f"{kept}: run `dtrain train --name one` to resume from it" in status["message"]
    assert job.news == [("goes_on", launch) for launch in range(2, launches + 1)]


def test_a_job_that_has_spent_its_budget_is_neither_replaced_nor_started_again(make: Callable[..., Job]) -> None:
    """Whatever else its processes die of in that moment: a peer is lost, and one is killed."""
    result = {"status": "budget", "error": "stopped at its budget", "launch": 1}
    job = make(ended(77, -9, 75), 3, result)
    status = job.run()
    assert (status["state"], status["exit_code"]) == ("failed", 77)
    assert status["message"].startswith("stopped at its budget. There is no checkpoint yet")
    assert job.placer.started == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]


def test_when_no_replacement_is_left_the_others_go_on(make: Callable[..., Job]) -> None:
    def look(launch: int, node: int, incarnation: int, looks: int) -> tuple[str, int | None]:
        if node == 1:
            return "gone", -9
        return ("gone", 0) if looks > 9 else ("running", None)

    job = make(look, 2, DONE)
    assert job.run()["replacements"] == 2
    assert job.placer.started == [(1, 0, 1), (1, 1, 1), (1, 1, 2), (1, 1, 3)]


def test_a_replacement_that_cannot_be_started_is_as_one_that_is_lost(make: Callable[..., Job]) -> None:
    job = make(lambda *place: ("gone", -9) if place[1] else ("gone", 0) if place[3] > 9 else ("running", None), 2, DONE)
    job.placer.unstartable = {2}
    status = job.run()
    assert (status["state"], status["replacements"]) == (JobState.SUCCEEDED, 2)
    assert job.placer.started == [(1, 0, 1), (1, 1, 1), (1, 1, 2), (1, 1, 2)]


def test_what_cannot_regroup_starts_again_with_the_nodes_that_remain(make: Callable[..., Job]) -> None:
    codes = {0: 75, 1: -9, 2: 75}
    job = make(lambda launch, node, *_: ("gone", codes[node] if launch == 1 else 0), 3, {"status": "failed"})
    job.run()
    assert job.placer.started == [(1, 0, 1), (1, 1, 1), (1, 2, 1), (2, 0, 1), (2, 1, 1)]
    assert (job.rundir.read_json(LAUNCH) or {})["node_count"] == 2


@pytest.mark.parametrize("grace", ["soon", "-1"])
def test_a_bad_grace_is_named_before_a_node_starts(make: Callable[..., Job], grace: str) -> None:
    job = make(ended(0), 1)
    job.supervisor.launch["env"]["DTRAIN_STOP_GRACE_SECONDS"] = grace
    assert f"DTRAIN_STOP_GRACE_SECONDS='{grace}' must be a number of seconds" in job.run()["message"]
    assert job.placer.started == []


def test_a_job_of_which_no_node_passes_its_pre_flight_says_what_failed(make: Callable[..., Job]) -> None:
    job = make(ended(76), 1)
    said = {"preflight": "the fan is broken", "exit_codes": (76,)}
    job.rundir.write_node(NodePresence(node_id=0, launch=1, incarnation=3, started_at=1.0, ended_at=2.0, **said))
    message = job.run()["message"]
    assert message.startswith("no node passed its pre-flight: the fan is broken (node 0 on this machine). Repair these")
    assert "preflight=off in DTRAIN_OPTIONS" in message
    assert job.placer.started == [(1, 0, 1), (1, 0, 2), (1, 0, 3)]


def test_that_nodes_wait_is_told_once_of_a_launch(make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain_dagster.clusters.supervision.supervisor.WAIT_SECONDS", 0.0)
    said = []

    def look(launch: int, node: int, incarnation: int, looks: int) -> tuple[str, int | None]:
        if looks > 5:
            said.append((job.rundir.read_json(STATUS) or {})["state"])
        return ("pending", None) if looks < 9 else ("gone", 0)

    job = make(look, 1, DONE)
    assert job.run()["state"] == JobState.SUCCEEDED
    assert job.news == [("waits", 1)]
    assert said[0] == "queued"


def test_a_node_that_is_kept_is_told_with_the_way_in(make: Callable[..., Job]) -> None:
    seen: list[Any] = []

    def look(launch: int, node: int, incarnation: int, looks: int) -> tuple[str, int | None]:
        if node == 0:
            return "running", None
        if looks > 5 and (kept := (job.rundir.read_json(STATUS) or {}).get("kept")):
            seen.append(kept)
        return "gone" if seen else "kept", 3

    job = make(look)
    status = job.run()
    assert (status["state"], status["exit_code"], status["kept"]) == ("failed", 3, [])
    assert job.news == [("kept", 1)]
    assert seen[0] == [{"node_id": 1, "until": 3.0, "how": "enter 1"}]
    assert 0 in job.placer.ended, "the others are given back"


def test_a_job_of_an_engine_is_on_record_before_a_node_is_asked_for(make: Callable[..., Job]) -> None:
    """So that its nodes are found again, and followed, if the supervisor is killed in between."""
    job = make(ended(0, 0), result=DONE)
    job.supervisor.launch["engine"] = "slurm"
    start, seen = job.placer.start, list[Any]()

    def buy(node_id: int, incarnation: int) -> None:
        seen.append((job.rundir.read_json(STATUS) or {}).get("state"))
        start(node_id, incarnation)

    job.placer.start = buy  # type: ignore[method-assign]
    assert job.run()["state"] == JobState.SUCCEEDED
    assert seen == ["queued", "queued"]


def test_a_supervisor_that_goes_on_with_a_job_says_so_before_it_looks_for_nodes(make: Callable[..., Job]) -> None:
    job, seen = make(ended(0, 0), result=DONE), list[Any]()
    job.rundir.write_json(STATUS, {"state": "running", "pid": 1, "replacements": 1})

    def find(launch: Mapping[str, Any]) -> set[int]:
        seen.append(job.rundir.read_json(STATUS))
        job.placer.begin_launch(launch)
        return set()

    job.placer.resume_launch = find  # type: ignore[method-assign]
    assert job.supervisor.run(resumes=True) is JobState.SUCCEEDED
    assert seen == [{"state": "running", "pid": os.getpid(), "replacements": 1}]
    assert (job.rundir.read_json(STATUS) or {})["replacements"] == 1

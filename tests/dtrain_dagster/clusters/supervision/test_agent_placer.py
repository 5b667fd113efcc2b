"""Nodes that an engine runs are placed, followed, handed over and ended: on an engine and presences of the test's own,
and a clock that it moves. Real agents are in `test_agents`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain_dagster.clusters.hosts import HostEvent, HostRecord
from dtrain_dagster.clusters.supervision import agent_placer, placer
from dtrain_dagster.clusters.supervision.agent_placer import (
    EXCLUSION_PATIENCE_SECONDS,
    LEAVE_SECONDS,
    LISTED_SECONDS,
    MOST_SUCCESSORS,
    AgentPlacer,
)
from dtrain_dagster.clusters.supervision.engine import EngineJob, EngineUnreachableError, name_job
from dtrain_dagster.clusters.supervision.placer import (
    ABANDON_SECONDS,
    HANDOVER_SECONDS,
    NodeRecord,
    is_successor_due,
    view_node,
)
from trainer.documents.presences import NodePresence
from trainer.exit_codes import EVICTED, UNFIT, UNUSABLE
from trainer.node.environment import LaunchError
from trainer.rundir import RunDir

LAUNCH = {"token": "ab" * 24, "launch": 1, "node_count": 2, "processes_per_node": 1, "elastic": True, "job_id": "one"}
NOW = 1_800_000_000.0


class Engine:
    """Its jobs are what the test makes of them. ``hosts``: free machines, the first ones first; without any, jobs
    wait."""

    poll_seconds = 1.0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.jobs: dict[tuple[int, int], EngineJob] = {}
        self.hosts = [f"h{number}" for number in range(9)]
        self.knows: set[str] | None = None
        """All machines of an engine that refuses a job which is kept away from each of them."""
        self.cancelled: list[tuple[str, bool]] = []
        self.is_down = self.is_stubborn = self.refuses = False

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        self._answer()
        if self.refuses:
            raise LaunchError("the engine refuses it: set another partition")
        name, key = name_job(launch, node_id, incarnation), (node_id, incarnation)
        if self.knows is not None and self.knows <= set(excluded):  # as SLURM does, which keeps the job nevertheless
            self.jobs[key] = EngineJob(id=name, node_id=node_id, incarnation=incarnation, state="ended", exit_code=-1)
            raise LaunchError("Requested node configuration is not available")
        if key not in self.jobs:
            free = [host for host in self.hosts if host not in excluded]
            found: dict[str, Any] = {"state": "pending", "reason": "(Resources)"}
            if free:
                self.hosts.remove(free[0])
                found = {"state": "running", "host": free[0], "started_at": self.clock.now()}
            self.jobs[key] = EngineJob(id=name, node_id=node_id, incarnation=incarnation, **found)
        return name

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        self._answer()
        return list(self.jobs.values())

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        self._answer()
        self.cancelled += [(name, force) for name in ids]
        for key, job in self.jobs.items():
            if job.id in ids and (force or job.state == "pending") and not self.is_stubborn:
                self.change(*key, state="ended", ended_at=self.clock.now())

    def read_log(self, job_id: str) -> str | None:
        return "python3: No module named trainer"

    def change(self, node_id: int, incarnation: int = 1, **fields: Any) -> None:
        self.jobs[node_id, incarnation] = replace(self.jobs[node_id, incarnation], **fields)

    def _answer(self) -> None:
        if self.is_down:
            raise EngineUnreachableError("the engine does not answer")


class Clock:
    """The clock of the supervisor, and of its `time`."""

    at = 1000.0

    def now(self) -> float:
        return NOW + self.at


class Job:
    """A placer, its engine, and the presences that its agents write."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.rundir, self.clock, self.engine = RunDir(str(folder / "run")), clock, Engine(clock)
        self.rundir.make()
        self.hosts = HostRecord(folder / "hosts")
        self.placer = self.another()

    def another(self) -> AgentPlacer:
        """The placer of the next supervisor."""
        engine: Any = self.engine
        clock: Any = self.clock
        return AgentPlacer(self.rundir, engine, Path(self.rundir.uri).parent / "secret", clock, self.hosts)

    def start(self, *nodes: int) -> None:
        self.placer.begin_launch(LAUNCH)
        for node_id in nodes:
            self.placer.start(node_id, 1)
            if (node_id, 1) in self.engine.jobs and self.engine.jobs[node_id, 1].state == "running":
                self.say(node_id)

    def say(self, node_id: int, incarnation: int = 1, **fields: Any) -> None:
        """An agent writes its presence."""
        now = self.clock.now()
        known = self.rundir.read_node(1, node_id, incarnation) or NodePresence(
            node_id=node_id, launch=1, incarnation=incarnation, started_at=now, host=f"10.0.0.{node_id}"
        )
        self.rundir.write_node(replace(known, **{"last_seen_at": now, **fields}))

    def look(self, seconds: float = 2.0) -> dict[int, tuple[int, str, tuple[int | None, ...]]]:
        """Incarnation, state and codes of each node, after a time in which the nodes that are there are heard."""
        self.clock.at += seconds
        for node in self.rundir.nodes():
            job = self.engine.jobs.get((node.node_id, node.incarnation))
            if node.ended_at is None and job is not None and job.state == "running":
                self.say(node.node_id, node.incarnation)
        seen = self.placer.look()
        return {node_id: (node.incarnation, node.state, node.codes) for node_id, node in seen.items()}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    clock = Clock()
    own = SimpleNamespace(monotonic=lambda: clock.at, sleep=lambda seconds: setattr(clock, "at", clock.at + seconds))
    for module in (placer, agent_placer):  # and not `time` itself, which threads that other tests have left sleep with
        monkeypatch.setattr(module, "time", own)
    return Job(tmp_path, clock)


def test_a_node_is_what_its_presence_says_at_once_and_the_engine_where_it_can_say_nothing(job: Job) -> None:
    job.start(0, 1, 2)
    assert job.look() == {node: (1, "running", (None,)) for node in range(3)}
    job.say(0, ended_at=job.clock.now(), exit_codes=(3,))
    assert job.look(0.0)[0] == (1, "gone", (3,)), "before the engine is asked"
    job.engine.change(1, state="ended", exit_code=137, ended_at=job.clock.now() + 1)
    job.engine.change(2, state="ended", lost=True, ended_at=job.clock.now())
    seen = job.look(3.0)
    assert (seen[1], seen[2]) == ((1, "gone", (-9,)), (1, "gone", (-9,)))
    closed = job.rundir.read_node(1, 1, 1)
    assert closed is not None
    assert closed.exit_codes == (-9,)
    assert closed.ended_at == job.engine.jobs[1, 1].ended_at, "it is paid for as long as its engine says"


def test_the_engine_is_asked_at_once_why_a_node_has_ended(job: Job) -> None:
    job.start(0, 1)
    job.look()
    job.engine.change(1, state="ended", lost=True, cause="taken", ended_at=job.clock.now())
    job.say(1, ended_at=job.clock.now(), exit_codes=(-9,))
    job.look(0.0)
    assert job.placer.look()[1].is_taken


def test_a_node_that_waits_says_why_and_one_that_is_refused_has_failed(job: Job) -> None:
    job.engine.hosts = []
    job.start(0)
    assert job.look() == {0: (1, "pending", (None,))}
    assert job.placer.look()[0].reason == "(Resources)"
    job.placer.end([0], 60.0)
    job.look()
    assert job.look()[0][1] == "gone"
    assert job.rundir.nodes() == [], "it costs nothing"
    job.engine.is_down = True
    job.placer.start(1, 1)
    assert job.placer.look()[1].reason == "the engine does not answer"
    job.engine.is_down, job.engine.refuses = False, True
    assert job.look()[1] == (1, "gone", (UNUSABLE,))
    assert "set another partition" in job.placer.look()[1].reason
    with pytest.raises(LaunchError, match="set another partition"):
        job.placer.start(2, 1)


def test_an_engine_that_does_not_answer_costs_no_node(job: Job) -> None:
    job.engine.is_down = True
    job.start(0)
    assert job.look()[0][1] == "pending"
    job.engine.is_down = False
    assert job.look()[0][1] == "pending", "submitted now"
    job.say(0)
    job.engine.is_down = True
    for _ in range(9):
        assert job.look(30.0)[0][1] == "running"
    job.placer.end([0], 5.0)
    assert job.look(5.0)[0][1] == "running", "its agent reads that it is to end"
    job.say(0, ended_at=job.clock.now(), exit_codes=(143,))
    assert job.look()[0] == (1, "gone", (143,))
    job.placer.start(1, 1)
    job.placer.end([1], 5.0)
    assert job.look(4.0)[1][1] == "pending", "it may have been submitted, with the answer lost"
    assert job.look(1.0)[1] == (1, "gone", (-9,))


def test_an_end_is_told_in_order_then_forced_then_no_longer_waited_for(job: Job) -> None:
    job.start(0)
    job.look()
    job.engine.is_stubborn = True
    name = job.engine.jobs[0, 1].id
    job.placer.end([0], 10.0)
    job.look()
    assert job.engine.cancelled == [(name, False)]
    job.placer.end([0], 3.0)
    assert job.look(4.0)[0][1] == "running"
    assert job.engine.cancelled == [(name, False), (name, True)]
    assert job.look(ABANDON_SECONDS)[0] == (1, "gone", (-9,)), "its machine may not answer"
    assert len(job.engine.cancelled) == 2


def test_another_supervisor_finds_nodes_successors_and_what_was_never_submitted(job: Job) -> None:
    job.start(0, 1)
    job.engine.change(1, ends_at=job.clock.now() + 3600)
    job.look()
    job.engine.change(1, ends_at=job.clock.now() + 60)
    job.clock.at += 3000
    job.look()
    assert set(job.engine.jobs) == {(0, 1), (1, 1), (1, 2)}
    job.placer = job.another()
    assert job.placer.resume_launch(LAUNCH) == {0, 1}
    assert job.look() == {0: (1, "running", (None,)), 1: (1, "running", (None,))}
    assert job.placer.successors.keys() == {1}
    assert set(job.engine.jobs) == {(0, 1), (1, 1), (1, 2)}, "nothing is bought twice"


def test_a_node_that_the_engine_forgot_while_nobody_looked_is_lost_unless_it_is_heard(job: Job) -> None:
    job.start(0, 1)
    job.look()
    last_seen = job.clock.now()
    job.placer = job.another()
    job.placer.resume_launch(LAUNCH)
    job.engine.jobs.clear()
    job.clock.at += 3600
    job.say(1)
    seen = {node_id: node.state for node_id, node in job.placer.look().items()}
    assert seen == {0: "gone", 1: "running"}
    job.clock.at += 9
    job.say(1)
    assert job.placer.look()[1].state == "running", "an engine that has lost its memory proves nothing"
    closed = job.rundir.read_node(1, 0, 1)
    assert closed is not None
    assert closed.ended_at == last_seen, "it is paid until it was seen last, and not until it was missed"
    job.placer.start(0, 2)
    job.engine.jobs.clear()
    assert job.look()[0][:2] == (2, "pending"), "it may not be listed yet"
    assert job.look(LISTED_SECONDS)[0][:2] == (2, "gone")
    assert job.placer.look()[0].is_lost
    said = job.rundir.storage.local_path("logs/node-0.log").read_text()
    assert said == "python3: No module named trainer\n", "what it printed is brought, where it wrote nothing itself"


def test_a_job_whose_agent_has_ended_leaves_by_itself_and_is_not_cancelled(job: Job) -> None:
    job.start(0, 1)
    job.look()
    job.say(0, ended_at=job.clock.now(), exit_codes=(0,))
    job.look()
    job.placer.sweep(LEAVE_SECONDS / 2)
    names = [job.engine.jobs[node, 1].id for node in (0, 1)]
    assert {name for name, _ in job.engine.cancelled} == {names[1]}, "the one whose agent runs"
    job.placer.sweep(LEAVE_SECONDS + 1)
    assert (names[0], True) in job.engine.cancelled
    assert all(each.state == "ended" for each in job.engine.jobs.values())


def test_a_host_that_loses_node_after_node_gets_no_more_of_them(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.start(0, 1)
    for incarnation in (1, 2):
        bad = job.engine.jobs[1, incarnation].host
        job.look()
        job.engine.change(1, incarnation, state="ended", exit_code=-9, ended_at=job.clock.now())
        job.look(3.0)
        job.engine.hosts.insert(0, bad)
        job.placer.start(1, incarnation + 1)
        job.say(1, incarnation + 1)
    assert (bad, job.engine.jobs[1, 3].host) == ("h1", "h2")
    assert [each.host for each in job.placer.exclusions()] == ["h1"]
    assert "host h1 is excluded: 2 nodes were lost there soon after they began" in capsys.readouterr().out


def test_a_node_that_finds_no_other_place_may_have_one_on_an_excluded_host(job: Job) -> None:
    job.hosts.add(HostEvent(host="h0", at=job.clock.now(), kind="unfit", why="the disk is full"))
    job.engine.hosts = ["h0"]
    job.start(0)
    assert job.look()[0][:2] == (1, "pending")
    job.look(EXCLUSION_PATIENCE_SECONDS)
    assert job.engine.jobs[0, 1].state == "ended"
    assert job.engine.jobs[0, 2].host == "h0"


def test_where_all_hosts_are_excluded_a_job_that_the_engine_refuses_for_that_is_placed_there(job: Job) -> None:
    job.hosts.add(HostEvent(host="h0", at=job.clock.now(), kind="unfit", why="the disk is full"))
    job.engine.hosts, job.engine.knows = ["h0"], {"h0"}
    job.start(0)
    job.say(0, 2)
    assert job.look()[0] == (2, "running", (None,))


def test_a_node_that_may_be_placed_anywhere_stays_so_while_the_engine_does_not_answer(job: Job) -> None:
    job.hosts.add(HostEvent(host="h0", at=job.clock.now(), kind="unfit", why="the disk is full"))
    job.engine.hosts = ["h0"]
    job.start(0)
    job.look()
    cancel = job.engine.cancel

    def cancel_and_fall_silent(ids: Sequence[str], force: bool) -> None:
        cancel(ids, force)
        job.engine.is_down = True

    job.engine.cancel = cancel_and_fall_silent  # type: ignore[method-assign]
    job.look(EXCLUSION_PATIENCE_SECONDS)
    assert (0, 2) not in job.engine.jobs
    job.engine.is_down = False
    job.look()
    assert job.engine.jobs[0, 2].host == "h0"


def warn(job: Job) -> None:
    """Node 1 is told that its machine will be taken away."""
    job.say(1, leaves_at=job.clock.now() + 300, leaves_because="Preempt")


def near_limit(job: Job, node_id: int = 1) -> None:
    job.engine.change(node_id, ends_at=job.clock.now() + 100)


@pytest.mark.parametrize("tell", [warn, near_limit])
def test_a_node_that_will_leave_stays_until_another_is_fit_to_take_its_place(
    job: Job, tell: Callable[[Job], None]
) -> None:
    job.start(0, 1)
    job.look(3600.0)
    tell(job)
    job.look()
    name = job.engine.jobs[1, 1].id
    job.say(1, 2, ended_at=job.clock.now(), exit_codes=(UNFIT,), preflight="its link is down")
    job.look()
    assert (1, 3) in job.engine.jobs, "an unfit successor is followed by another"
    job.say(1, 3)
    job.look()
    assert job.look()[1] == (1, "running", (None,))
    assert job.engine.cancelled == [], "not before it is ready"
    job.say(1, 3, ready_at=job.clock.now())
    job.look(), job.look()
    assert job.engine.cancelled == [(name, False)]
    job.say(1, ended_at=job.clock.now(), exit_codes=(EVICTED,))
    assert job.look()[1][:2] == (3, "running")


def test_nodes_make_way_one_after_the_other_so_that_the_others_hold_the_state_of_the_training(job: Job) -> None:
    job.start(0, 1)
    job.look(3600.0)
    for node_id in (0, 1):
        near_limit(job, node_id)
    job.look()
    for node_id in (0, 1):
        job.say(node_id, 2, ready_at=job.clock.now())
    for _ in range(3):
        job.look()
    assert len(job.engine.cancelled) == 1
    job.look(HANDOVER_SECONDS)
    job.look()
    assert len({name for name, _ in job.engine.cancelled}) == 2, "the first one has had its time"


def test_a_node_without_a_successor_is_taken_away_and_counts_as_no_failure(job: Job) -> None:
    job.start(0, 1)
    job.look()
    job.engine.hosts = []
    warn(job)
    job.look()
    for incarnation in range(2, 9):  # whatever becomes of them
        if (1, incarnation) in job.engine.jobs:
            job.engine.change(1, incarnation, state="ended", lost=True, cause="taken", ended_at=job.clock.now())
        job.look()
    assert max(incarnation for node, incarnation in job.engine.jobs if node == 1) == 1 + MOST_SUCCESSORS
    job.say(1, ended_at=job.clock.now(), exit_codes=(EVICTED,))
    job.look()
    left = job.placer.look()[1]
    assert (left.is_lost, left.is_taken) == (True, True)


def test_where_all_are_ended_no_successor_takes_over(job: Job) -> None:
    job.start(0, 1)
    job.look()
    warn(job)
    job.look()
    job.say(1, 2)
    job.placer.end([0, 1], 60.0)
    job.look()
    assert {name for name, _ in job.engine.cancelled} == {each.id for each in job.engine.jobs.values()}
    for key in [(0, 1), (1, 1), (1, 2)]:
        job.say(*key, ended_at=job.clock.now(), exit_codes=(EVICTED,))
    assert job.look() == {0: (1, "gone", (EVICTED,)), 1: (1, "gone", (EVICTED,))}


def test_a_node_that_is_kept_is_neither_at_work_nor_gone_and_gets_no_successor() -> None:
    there = NodePresence(node_id=0, launch=1, started_at=0.0, last_seen_at=995.0, exit_codes=(1,), kept_since=900.0)
    job = EngineJob(id="7", node_id=0, incarnation=1, state="running", started_at=0.0, ends_at=1010.0)
    record = NodeRecord(node_id=0, incarnation=1, made_at=0.0, job_id="7", job=job, presence=there)
    seen = view_node(record, 2, 1000.0)
    assert (seen.state, seen.codes, seen.runs, seen.gone_seconds) == ("kept", (1, -9), False, None)
    assert not is_successor_due(record, 1000.0)
    assert is_successor_due(replace(record, presence=replace(there, kept_since=None)), 1000.0)
    ended = replace(record, job=replace(job, state="ended", ended_at=990.0))  # its machine has gone meanwhile
    assert view_node(ended, 2, 1000.0).state == "gone"

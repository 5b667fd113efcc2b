"""Nodes that an engine runs: they are placed, followed, replaced and ended by agents and their presences."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain_dagster.clusters.hosts import HostEvent, HostRecord
from dtrain_dagster.clusters.notices import describe_kept
from dtrain_dagster.clusters.supervision import agent_placer
from dtrain_dagster.clusters.supervision.agent_placer import AgentPlacer
from dtrain_dagster.clusters.supervision.engine import EngineJob, name_job
from dtrain_dagster.clusters.supervision.placer import NodeRecord, is_successor_due, view_node
from harness.engines.process_engine import ProcessEngine
from harness.metadata_service import metadata_service
from harness.waiting import until
from trainer.comm.launch_secret import SecretFile
from trainer.documents.presences import NodePresence
from trainer.node.__main__ import is_worth_keeping
from trainer.rundir import RunDir
from trainer.runtime.clock import SteadyClock
from trainer.runtime.machine_warnings import LEAVE_SECONDS

HEAD = """
import os, signal, sys, time
from pathlib import Path
OUT, RANK = Path({out!r}), int(os.environ["RANK"])
INCARNATION = int(os.environ.get("DTRAIN_INCARNATION", "1"))
"""


class Job:
    """A job of a few scripts, and its supervisor."""

    def __init__(self, folder: Path, script: str, nodes: int = 2, processes: int = 1, **fields: Any) -> None:
        self.folder = folder
        self.rundir = RunDir(str(folder / "run"))
        self.rundir.make()
        path = folder / "script.py"
        path.write_text(HEAD.format(out=str(folder)) + textwrap.dedent(script))
        self.launch: dict[str, Any] = {
            "job_id": "one", "token": os.urandom(24).hex(), "launch": 1, "node_count": nodes, "elastic": True,
            "env": {"DTRAIN_STOP_GRACE_SECONDS": "3", "DTRAIN_PEER_GRACE_SECONDS": "1"},
            "processes_per_node": processes, "threads_per_rank": 1,
            "command": [sys.executable, str(path)], "master_port": None, "engine": "ray",
            "max_replacements": 3, "replacement_delay_seconds": 0.0, "preflight": "off", **fields,
        }  # fmt: skip
        self.rundir.write_json("launch.json", self.launch)
        self.engine = ProcessEngine(folder / "engine", self.rundir.uri, "")
        self.supervisors: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        program = (sys.executable, "-m", "harness.engines.process_engine")
        command = [*program, self.rundir.uri, str(self.folder), *arguments]
        with open(self.folder / "supervisor.log", "ab") as log:
            self.supervisors.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[4]))
        return self.supervisors[-1]

    def ends(self) -> dict[str, Any]:
        """The final status."""
        return self.wait(lambda: self.status() if self.status().get("ended_at") else None, "the end of the job")

    def status(self) -> dict[str, Any]:
        return self.rundir.read_json("status.json") or {}

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        return until(condition, lambda: f"{what}\n{self.said()}")

    def said(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("run/logs/*"), *self.folder.glob("engine/*/out")]
        return "\n".join(f"--- {path}\n{path.read_text()}" for path in logs)

    def file(self, name: str) -> Path:
        self.wait((self.folder / name).exists, name)
        return self.folder / name

    def presences(self) -> list[NodePresence]:
        return self.rundir.nodes()

    def name(self, node: int, incarnation: int = 1) -> str:
        return name_job(self.launch, node, incarnation)

    def processes(self) -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline", "status"])
        mine = [one for one in found if any(str(self.folder) in word for word in one.info["cmdline"] or [])]
        return [one for one in mine if one.info["status"] != psutil.STATUS_ZOMBIE]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(*given: Any, **named: Any) -> Job:
        made.append(Job(tmp_path, *given, **named))
        return made[-1]

    yield make
    for job in made:
        for process in job.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
                process.kill()
        for supervisor in job.supervisors:
            supervisor.kill()
            supervisor.wait()


WAITS = """
(OUT / f"began-{RANK}-{INCARNATION}").touch()
print("rank", RANK, "waits", flush=True)
while not (OUT / "go").exists():
    time.sleep(0.02)
"""
SUCCEEDS = (
    WAITS
    + """
(Path(sys.argv[0]).parent / "run" / "result.json").write_text('{"status": "succeeded"}')
"""
)


def test_nodes_run_as_jobs_of_the_engine_and_are_paid_by_their_presence(make_job: Callable[..., Job]) -> None:
    job = make_job("assert os.environ['DTRAIN_HOST']\n" + SUCCEEDS, nodes=2, processes=2)
    job.start()
    for rank in range(4):
        job.file(f"began-{rank}-1")
    job.wait(lambda: job.status()["state"] == "running", "word of it")
    (job.folder / "go").touch()
    assert job.ends()["state"] == "succeeded", job.said()
    assert [(one.node_id, one.exit_codes, bool(one.host)) for one in job.presences()] == [
        (0, (0, 0), True), (1, (0, 0), True),
    ]  # fmt: skip
    assert all(one.ended_at and one.ended_at >= one.started_at for one in job.presences())
    assert "rank 2 waits" in (job.folder / "run" / "logs" / "node-1.log").read_text()
    job.wait(lambda: not job.processes(), "the end of all processes")


def test_a_killed_agent_takes_its_ranks_with_it_and_is_replaced(make_job: Callable[..., Job]) -> None:
    job = make_job(SUCCEEDS)
    job.start()
    job.file("began-1-1")
    agent = job.engine.agent(job.name(1))
    ranks = agent.children()
    agent.kill()
    job.file("began-1-2")
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    (job.folder / "go").touch()
    assert job.ends()["state"] == "succeeded", job.said()
    assert job.status()["replacements"] == 1
    ends = {(one.node_id, one.incarnation): one.exit_codes for one in job.presences()}
    assert ends == {(0, 1): (0,), (1, 1): (-9,), (1, 2): (0,)}


def test_a_machine_that_is_cut_off_but_reaches_the_storage_makes_way(make_job: Callable[..., Job]) -> None:
    """Its agent goes on writing that it is there, and no engine can end it: it reads that it was given up."""
    job = make_job(SUCCEEDS)
    job.start()
    job.file("began-1-1")
    (job.folder / "engine" / f"{job.name(1)}.lost").touch()
    job.file("began-1-2")
    words = "--node 1 --incarnation 1"

    def lives(process: psutil.Process) -> bool:
        try:
            return words in " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            return False

    job.wait(lambda: not any(map(lives, job.processes())), "the end of what is cut off")
    assert "was given up as lost" in (job.engine.read_log(job.name(1)) or "")
    (job.folder / "go").touch()
    assert job.ends()["state"] == "succeeded"
    first, lost, second = sorted(job.presences(), key=lambda one: (one.node_id, one.incarnation))
    assert (first.exit_codes, lost.exit_codes, second.exit_codes) == ((0,), (-9,), (0,))
    assert lost.ended_at is not None
    assert lost.ended_at <= second.started_at


@pytest.mark.slow
def test_a_host_that_loses_node_after_node_gets_no_more_of_them(make_job: Callable[..., Job]) -> None:
    job = make_job(SUCCEEDS, nodes=2, max_replacements=2)
    (job.engine.folder / "hosts").write_text("bad good better")
    (job.engine.folder / "bad.flaky").touch()
    job.start()
    job.file("began-0-3"), job.file("began-1-1")
    job.wait(lambda: job.status().get("excluded_hosts"), "word of it")
    (job.folder / "go").touch()
    status = job.ends()
    assert (status["state"], status["replacements"]) == ("succeeded", 2), job.said()
    assert [each["host"] for each in status["excluded_hosts"]] == ["bad"]
    assert "host bad is excluded: 2 nodes were lost there soon after they began" in job.said()
    [event] = RunDir(str(job.folder / "run")).events("host_excluded")
    assert (event["host"], event["why"]) == ("bad", status["excluded_hosts"][0]["why"])


@pytest.mark.slow
def test_a_node_that_fails_its_pre_flight_is_replaced_before_it_has_ranks(make_job: Callable[..., Job]) -> None:
    job = make_job(
        """
        (OUT / f"began-{RANK}-{INCARNATION}").touch()
        while not (OUT / "began-1-2").exists():
            time.sleep(0.02)
        """,
        preflight="quick: test $NODE_RANK.$DTRAIN_INCARNATION != 1.1 || { echo its link is down; exit 3; }",
    )
    job.start()
    assert job.ends()["replacements"] == 1
    assert not (job.folder / "began-1-1").exists()
    good, bad, better = sorted(job.presences(), key=lambda one: (one.node_id, one.incarnation))
    assert (bad.preflight, bad.exit_codes) == ("the site's own check: its link is down", (76,))
    assert (good.preflight, good.exit_codes, better.preflight, better.exit_codes) == ("", (0,), "", (0,))
    assert bad.ended_at is not None
    assert bad.preflight_seconds == pytest.approx(bad.ended_at - bad.started_at, abs=1.0)
    assert 0 < good.preflight_seconds < 30
    log = (job.folder / "run/logs/node-1.log").read_text()
    assert "pre-flight failed: the site's own check: its link is down" in log
    assert "pre-flight: passed in" in log


FAILS_ON_NODE_1 = """
    (OUT / f"began-{RANK}").touch()
    while not (OUT / f"began-{1 - RANK}").exists():
        time.sleep(0.02)
    if RANK == 1:
        sys.exit("the model is not there")
    time.sleep(600)
"""


def test_a_node_that_failed_is_kept_until_the_job_is_cancelled(make_job: Callable[..., Job]) -> None:
    job = make_job(FAILS_ON_NODE_1, keep_failed_seconds=600.0)
    supervisor = job.start()
    status = job.wait(lambda: job.status() if job.status().get("kept") else None, "a node that is kept")
    assert status["state"] == "running"
    assert status["message"].startswith("failed: rank 1 on node 1 failed first")
    other, kept = job.wait(lambda: job.presences() if job.presences()[0].ended_at else None, "the other node to end")
    assert (kept.node_id, kept.ended_at, kept.exit_codes) == (1, None, (1,))
    assert kept.kept_until - kept.kept_since == pytest.approx(600.0)
    assert other.kept_since is None
    (line,) = describe_kept(status["kept"])
    assert line.startswith("node 1 is kept until ")
    assert line.endswith(f" UTC: enter {job.name(1)}")
    supervisor.kill()  # the node outlives its supervisor, and the next one finds it kept
    supervisor.wait()
    job.start("--resume")
    again = job.wait(lambda: job.status() if job.status()["pid"] != status["pid"] else None, "another supervisor")
    job.wait(lambda: job.status().get("kept"), "the node to be found again")
    os.kill(again["pid"], signal.SIGTERM)
    status = job.ends()
    assert (status["state"], status["exit_code"], status["kept"]) == ("failed", 1, [])
    assert status["message"].startswith("rank 1 on node 1 failed first")
    kept = job.presences()[1]
    assert kept.ended_at is not None
    assert kept.exit_codes == (1,)
    job.wait(lambda: not job.processes(), "the end of all processes")


def test_a_node_is_kept_for_its_time(make_job: Callable[..., Job]) -> None:
    job = make_job("sys.exit(3)", nodes=1, keep_failed_seconds=1.0)
    job.start()
    assert job.ends()["exit_code"] == 3
    (kept,) = job.presences()
    assert 1.0 <= kept.ended_at - kept.kept_since < 20.0


def test_a_node_that_is_asked_to_end_during_its_pre_flight_starts_no_ranks(make_job: Callable[..., Job]) -> None:
    job = make_job('(OUT / "began").touch()', nodes=1, preflight="quick: touch $DTRAIN_TEST_MARK; sleep 60")
    job.launch["env"]["DTRAIN_TEST_MARK"] = str(job.folder / "checks")
    job.rundir.write_json("launch.json", job.launch)
    job.start()
    job.file("checks")
    job.engine.agent(job.name(0)).send_signal(signal.SIGTERM)
    job.wait(lambda: job.presences()[0].ended_at, "its end")
    assert job.presences()[0].exit_codes == (143,)
    assert not (job.folder / "began").exists()


def test_a_node_is_not_kept_beyond_the_budget_of_its_job(make_job: Callable[..., Job]) -> None:
    job = make_job("sys.exit(3)", nodes=1, keep_failed_seconds=600.0)
    job.rundir.write_json("budget.json", {"max_node_seconds": 0.1})
    job.start()
    assert job.ends()["exit_code"] == 3
    assert "the budget of the job is spent" in job.said()


def test_a_node_that_is_kept_is_neither_at_work_nor_gone_and_gets_no_successor() -> None:
    there = NodePresence(node_id=0, launch=1, started_at=0.0, last_seen_at=995.0, exit_codes=(1,), kept_since=900.0)
    job = EngineJob(id="7", node_id=0, incarnation=1, state="running", started_at=0.0, ends_at=1010.0)
    record = NodeRecord(node_id=0, incarnation=1, made_at=0.0, job_id="7", job=job, presence=there)
    seen = view_node(record, 2, 1000.0)
    assert (seen.state, seen.codes, seen.runs, seen.gone) == ("kept", (1, -9), False, False)
    assert not is_successor_due(record, 1000.0)
    assert is_successor_due(replace(record, presence=replace(there, kept_since=None)), 1000.0)
    ended = replace(record, job=replace(job, state="ended", ended_at=990.0))  # its machine has gone meanwhile
    assert view_node(ended, 2, 1000.0).state == "gone"


@pytest.mark.parametrize(
    ("codes", "is_elastic", "is_kept"),
    [
        ((0, 1), True, True),
        ((2,), True, True),
        ((0,), True, False),
        ((-9,), True, False),  # another node takes its place
        ((-9,), False, True),
        ((-15, 1), True, True),
        ((143, -15), False, False),
        ((75, 77), False, False),
        ((76,), False, False),
    ],
)
def test_nodes_are_kept_for_failures_alone(codes: tuple[int, ...], is_elastic: bool, is_kept: bool) -> None:
    assert is_worth_keeping(codes, is_elastic) is is_kept


def test_the_supervisor_is_killed_and_another_goes_on_with_the_same_nodes(make_job: Callable[..., Job]) -> None:
    job = make_job(SUCCEEDS)
    first = job.start()
    job.file("began-0-1"), job.file("began-1-1")
    job.wait(lambda: job.status().get("state") == "running", "the first status")
    first.kill()
    first.wait()
    agents = [job.engine.agent(job.name(node)).pid for node in range(2)]
    job.start("--resume")
    job.wait(lambda: job.status().get("pid") != first.pid, "another supervisor")
    assert [job.engine.agent(job.name(node)).pid for node in range(2)] == agents
    (job.folder / "go").touch()
    assert job.ends()["state"] == "succeeded", job.said()
    assert len(job.presences()) == 2


LAUNCH = {"token": "ab" * 24, "launch": 1, "node_count": 2, "processes_per_node": 1, "elastic": True, "job_id": "one"}


class ForgetfulEngine:
    """It has a job of every name, and shows none of them."""

    poll_seconds = 0.0

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        return name_job(launch, node_id, incarnation)

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        return []

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        raise AssertionError("nothing is there to be cancelled")

    def read_log(self, job_id: str) -> str | None:
        return "python3: No module named trainer"


def test_a_node_that_the_engine_forgot_while_nobody_looked_is_lost_unless_it_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(str(tmp_path / "run"))
    rundir.make()
    clock = SteadyClock.begin()
    now = clock.now()
    for node_id, silence in ((0, 3600.0), (1, 0.0)):
        rundir.begin_presence(
            NodePresence(node_id=node_id, launch=1, started_at=now - 7200, last_seen_at=now - silence, host="n1")
        )
    placer = AgentPlacer(rundir, ForgetfulEngine(), SecretFile(tmp_path / "secret"), clock, HostRecord(tmp_path / "h"))
    assert placer.resume_launch(LAUNCH) == {0, 1}
    until(lambda: placer.look()[0].state == "gone", "the loss")
    assert [node.state for node in placer.look().values()] == ["gone", "running"]
    closed = rundir.read_node(1, 0, 1)
    assert closed is not None
    assert closed.ended_at == now - 3600, "it is paid until it was seen last, and not until it was missed"
    placer.start(0, 2)
    assert placer.look()[0].state == "pending"
    monkeypatch.setattr("dtrain_dagster.clusters.supervision.agent_placer.LISTED_SECONDS", 0.0)
    until(lambda: placer.look()[0].state == "gone", "the loss of one that never spoke")
    assert placer.look()[0].is_lost
    said = (tmp_path / "run/logs/node-0.log").read_text()
    assert said == "python3: No module named trainer\n", "what it printed is brought, where it wrote nothing itself"


class SlowEngine(ForgetfulEngine):
    """Its jobs of both nodes run for a second after the first look at them, unless they are cancelled."""

    def __init__(self) -> None:
        self.ends_at = float("inf")
        self.cancelled: list[int] = []

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        self.ends_at = min(self.ends_at, time.monotonic() + 1.0)
        return [
            EngineJob(
                id=str(node), node_id=node, incarnation=1,
                state="ended" if node in self.cancelled or time.monotonic() > self.ends_at else "running",
            )
            for node in range(2)
        ]  # fmt: skip

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        self.cancelled += [int(each) for each in ids]


def test_a_job_whose_agent_has_ended_leaves_by_itself_and_is_not_cancelled(tmp_path: Path) -> None:
    rundir = RunDir(str(tmp_path / "run"))
    rundir.make()
    clock, engine = SteadyClock.begin(), SlowEngine()
    now = clock.now()
    for node_id, end in ((0, {"ended_at": now, "exit_codes": (0,)}), (1, {})):
        rundir.begin_presence(
            NodePresence(node_id=node_id, launch=1, started_at=now - 60, last_seen_at=now, host="n1", **end)
        )
    placer = AgentPlacer(rundir, engine, SecretFile(tmp_path / "secret"), clock, HostRecord(tmp_path / "hosts"))
    placer.resume_launch(LAUNCH)
    placer.look()
    engine.ends_at = float("inf")
    placer.sweep(5.0)
    assert engine.cancelled == [1], "the one whose agent runs"
    assert all(job.state == "ended" for job in engine.list_jobs(LAUNCH)), "the sweep has waited for both"


class FullEngine(ForgetfulEngine):
    """Its jobs wait for a machine unless they may be placed on the bad one."""

    def __init__(self) -> None:
        self.excluded: dict[int, Sequence[str]] = {}
        self.cancelled: list[str] = []

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        self.excluded[incarnation] = excluded
        return str(incarnation)

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        newest = max(self.excluded)
        state: Any = "pending" if self.excluded[newest] else "running"
        return [EngineJob(id=str(newest), node_id=0, incarnation=newest, state=state)]

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        self.cancelled += ids


def test_a_node_that_finds_no_other_place_may_have_one_on_an_excluded_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(str(tmp_path / "run"))
    rundir.make()
    clock, engine, hosts = SteadyClock.begin(), FullEngine(), HostRecord(tmp_path / "hosts")
    hosts.add(HostEvent(host="bad", at=clock.now(), kind="unfit", why="the disk is full"))
    placer = AgentPlacer(rundir, engine, SecretFile(tmp_path / "secret"), clock, hosts)
    placer.begin_launch(LAUNCH | {"node_count": 1})
    placer.start(0, 1)
    until(lambda: placer.look()[0].state == "pending", "its place in the queue")
    assert engine.excluded == {1: ("bad",)}
    monkeypatch.setattr(agent_placer, "EXCLUSION_PATIENCE_SECONDS", 0.0)
    until(lambda: placer.look()[0].state == "running", "a place")
    assert engine.excluded == {1: ("bad",), 2: ()}
    assert engine.cancelled == ["1"]


def test_an_engine_that_does_not_answer_costs_no_node(make_job: Callable[..., Job]) -> None:
    job = make_job(SUCCEEDS)
    (job.folder / "engine" / "down").touch()
    job.start("--hasty")
    job.wait(lambda: job.status().get("state") == "queued", "a job that waits")
    job.wait(lambda: "does not answer" in job.status()["message"], "the reason")
    (job.folder / "engine" / "down").unlink()
    job.file("began-0-1"), job.file("began-1-1")
    (job.folder / "engine" / "down").touch()
    time.sleep(3 * ProcessEngine.poll_seconds)
    (job.folder / "go").touch()  # presences are enough to see the end
    assert job.ends()["state"] == "succeeded", job.said()
    assert job.status()["replacements"] == 0


def test_a_cancelled_job_ends_in_order_though_the_engine_does_not_answer(make_job: Callable[..., Job]) -> None:
    job = make_job(
        "signal.signal(signal.SIGTERM, lambda *_: ((OUT / f'saved-{RANK}').touch(), sys.exit(143)))\n" + WAITS
    )
    supervisor = job.start("--hasty")
    job.file("began-0-1"), job.file("began-1-1")
    (job.folder / "engine" / "down").touch()
    supervisor.send_signal(signal.SIGTERM)
    assert job.ends()["state"] == "cancelled"
    job.wait(lambda: not job.processes(), "the end of all processes")
    assert (job.folder / "saved-0").exists()
    assert (job.folder / "saved-1").exists()


def test_what_waits_in_the_queue_is_told_and_cancelled_with_the_job(make_job: Callable[..., Job]) -> None:
    job = make_job(WAITS)
    (job.folder / "engine" / "full").touch()
    supervisor = job.start()
    job.wait(lambda: "(Resources)" in job.status().get("message", ""), "the reason")
    assert job.status()["state"] == "queued"
    supervisor.send_signal(signal.SIGTERM)
    assert job.ends()["state"] == "cancelled"
    (job.folder / "engine" / "full").unlink()
    assert [one.state for one in job.engine.list_jobs(job.launch)] == ["ended", "ended"]
    assert job.presences() == []


def test_a_refusal_is_told_before_anything_runs(make_job: Callable[..., Job]) -> None:
    job = make_job(WAITS)
    (job.folder / "engine" / "refuse").touch()
    job.start()
    assert job.ends()["state"] == "failed"
    assert "set another partition" in job.status()["message"]


def test_a_time_limit_is_met_by_a_successor_that_was_submitted_before(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n" + SUCCEEDS, max_replacements=0)
    job.start()
    job.file("began-0-1"), job.file("began-1-1")
    os.utime(job.folder / "engine" / job.name(1) / "pid", (time.time() - 3600,) * 2)  # it runs for an hour already
    (job.folder / "engine" / f"{job.name(1)}.ends_at").write_text(str(time.time() + 500))
    job.file("began-1-2")
    (job.folder / "go").touch()
    assert job.ends()["state"] == "succeeded", job.said()
    ends = {(one.node_id, one.incarnation): one for one in job.presences()}
    assert ends[1, 1].exit_codes == (143,)
    assert ends[1, 2].exit_codes == (0,)
    assert job.status()["replacements"] == 0


LEAVES = (
    """
def leave(*_):
    (OUT / f"left-{RANK}-{INCARNATION}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
"""
    + SUCCEEDS
)


@pytest.mark.slow
@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
def test_a_node_that_is_warned_makes_way_for_another_or_leaves_in_time(
    make_job: Callable[..., Job], has_room: bool
) -> None:
    with metadata_service() as service:
        job = make_job(LEAVES)
        (job.engine.folder / "metadata").write_text(service.url)
        job.start("--hasty")
        job.file("began-0-1"), job.file("began-1-1")
        if not has_room:
            (job.engine.folder / "full").touch()
        service.announce(job.name(1), seconds=LEAVE_SECONDS + (60 if has_room else 3))
        job.wait(lambda: any(one.leaves_at for one in job.presences()), "word of it")
        job.file("left-1-1")
        (before,) = [one for one in job.presences() if (one.node_id, one.incarnation) == (1, 1)]
        if has_room:
            job.file("began-1-2")
            begun = next(one for one in job.presences() if one.incarnation == 2).started_at
            assert begun < job.wait(lambda: _ended_at(job, 1), "its end"), "the other one was there first"
        else:
            assert before.leaves_at is not None
            assert time.time() >= before.leaves_at, "not before it had to"
            (job.engine.folder / "full").unlink()
            job.file("began-1-2")
        (job.folder / "go").touch()
        status = job.ends()
        assert (status["state"], status["replacements"], status["preemptions"]) == ("succeeded", 0, 0), job.said()
        assert before.leaves_because.startswith("Preempt")


@pytest.mark.slow
def test_a_node_stays_until_another_is_fit_to_take_its_place(make_job: Callable[..., Job]) -> None:
    with metadata_service() as service:
        job = make_job(LEAVES, preflight='quick: test "$DTRAIN_INCARNATION" != 2')
        (job.engine.folder / "metadata").write_text(service.url)
        job.start("--hasty")
        job.file("began-0-1"), job.file("began-1-1")
        service.announce(job.name(1), "Redeploy", 600.0)
        job.file("began-1-3")
        (unfit,) = [one for one in job.presences() if (one.node_id, one.incarnation) == (1, 2)]
        ended_at = _ended_at(job, 1)
        assert ended_at is not None
        assert unfit.ended_at is not None
        assert unfit.preflight
        assert unfit.ended_at < ended_at
        (job.folder / "go").touch()
        status = job.ends()
        assert (status["state"], status["replacements"], status["preemptions"]) == ("succeeded", 0, 0), job.said()


def _ended_at(job: Job, node: int) -> float | None:
    return next(one for one in job.presences() if (one.node_id, one.incarnation) == (node, 1)).ended_at


@pytest.mark.slow
def test_a_node_that_its_engine_ends_trains_on_until_another_is_there_and_not_where_all_are_ended(
    make_job: Callable[..., Job],
) -> None:
    job = make_job(LEAVES)
    (job.engine.folder / "hold").write_text("60")
    supervisor = job.start("--hasty")
    job.file("began-0-1"), job.file("began-1-1")
    (job.engine.folder / "full").touch()
    job.engine.agent(job.name(1)).send_signal(signal.SIGTERM)
    job.wait(lambda: any(one.leaves_at for one in job.presences()), "word of it")
    time.sleep(1.0)
    assert not (job.folder / "left-1-1").exists()
    (job.engine.folder / "full").unlink()
    job.file("left-1-1"), job.file("began-1-2")
    assert job.status()["preemptions"] == 0
    supervisor.send_signal(signal.SIGTERM)
    assert job.ends()["state"] == "cancelled"
    assert {one.exit_codes for one in job.presences()} == {(143,)}, "in order, and at once"


def test_ranks_of_a_fixed_world_find_rank_0_where_it_has_come(make_job: Callable[..., Job]) -> None:
    job = make_job(
        "(OUT / f'at-{RANK}').write_text(os.environ['MASTER_ADDR'] + ' ' + os.environ['MASTER_PORT'])", elastic=False
    )
    job.start()
    assert job.ends()["state"] == "succeeded", job.said()
    assert job.file("at-0").read_text() == job.file("at-1").read_text()
    place = json.loads((job.folder / "run" / "rendezvous" / "l0001.json").read_text())
    assert job.file("at-1").read_text() == f"{place['host']} {place['port']}"


def test_a_second_agent_of_an_incarnation_starts_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job(SUCCEEDS, nodes=1)
    job.start()
    began = job.file("began-0-1")
    began.unlink()
    command = json.loads((job.folder / "engine" / job.name(0) / "job.json").read_text())["command"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 75
    assert "another agent has begun" in second.stdout
    (job.folder / "go").touch()
    assert job.ends()["state"] == "succeeded", job.said()
    assert not began.exists()
    late = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert late.returncode == 75
    assert "is over" in late.stdout

"""The agents of nodes, as processes of an engine and under a real supervisor: what they start, see and end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain_dagster.clusters.notices import describe_kept
from dtrain_dagster.clusters.supervision.engine import name_job
from harness.engines.process_engine import ProcessEngine
from harness.metadata_service import metadata_service
from harness.waiting import until
from trainer.documents.presences import NodePresence
from trainer.node.__main__ import is_worth_keeping
from trainer.rundir import RunDir
from trainer.runtime.machine_warnings import LEAVE_SECONDS

pytestmark = pytest.mark.slow
HEAD = """
import os, signal, sys, time
from pathlib import Path
from trainer.runtime.launch import Launch
OUT, RANK = Path({out!r}), int(os.environ["RANK"])
INCARNATION = Launch.read(os.environ).incarnation
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
            "env": {"DTRAIN_STOP_GRACE_SECONDS": "3"},
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


def test_an_agent_and_then_the_supervisor_are_killed_and_the_job_goes_on(make_job: Callable[..., Job]) -> None:
    job = make_job("assert os.environ['DTRAIN_HOST']\n" + SUCCEEDS, nodes=2, processes=2)
    first = job.start()
    for rank in range(4):
        job.file(f"began-{rank}-1")
    agent = job.engine.agent(job.name(1))
    ranks = agent.children()
    agent.kill()
    job.file("began-2-2"), job.file("began-3-2")
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    first.kill()
    first.wait()
    agents = [job.engine.agent(name).pid for name in (job.name(0), job.name(1, 2))]
    job.start("--resume")
    job.wait(lambda: job.status().get("pid") != first.pid, "another supervisor")
    assert [job.engine.agent(name).pid for name in (job.name(0), job.name(1, 2))] == agents
    command = json.loads((job.folder / "engine" / job.name(0) / "job.json").read_text())["command"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (second.returncode, "another agent has begun" in second.stdout) == (75, True)
    (job.folder / "go").touch()
    status = job.ends()
    assert (status["state"], status["replacements"]) == ("succeeded", 1), job.said()
    ends = {(one.node_id, one.incarnation): one.exit_codes for one in job.presences()}
    assert ends == {(0, 1): (0, 0), (1, 1): (-9, -9), (1, 2): (0, 0)}
    assert all(one.host and one.ended_at and one.ended_at >= one.started_at for one in job.presences())
    assert "rank 2 waits" in (job.folder / "run" / "logs" / "node-1.log").read_text()
    late = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (late.returncode, "is over" in late.stdout) == (75, True)
    job.wait(lambda: not job.processes(), "the end of all processes")


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


def test_a_node_that_fails_its_pre_flight_is_replaced_before_it_has_ranks(make_job: Callable[..., Job]) -> None:
    job = make_job(
        """
        (OUT / f"began-{RANK}-{INCARNATION}").touch()
        while not (OUT / "began-1-2").exists():
            time.sleep(0.02)
        """,
        preflight="quick: test $NODE_RANK != 1 || echo $DTRAIN_LAUNCH | grep -q incarnation || "
        "{ echo its link is down; exit 3; }",
    )
    job.start()
    assert job.ends()["replacements"] == 1
    assert not (job.folder / "began-1-1").exists()
    good, bad, better = job.presences()
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


@pytest.mark.parametrize(
    ("keeps", "budget", "at_least"), [(1.0, None, 1.0), (600.0, 0.1, 0.0)], ids=["its time", "the budget of the job"]
)
def test_a_node_is_kept_within(
    make_job: Callable[..., Job], keeps: float, budget: float | None, at_least: float
) -> None:
    job = make_job("sys.exit(3)", nodes=1, keep_failed_seconds=keeps)
    if budget is not None:
        job.rundir.write_json("budget.json", {"max_node_seconds": budget})
    job.start()
    assert job.ends()["exit_code"] == 3
    (kept,) = job.presences()
    assert at_least <= kept.ended_at - (kept.kept_since or kept.ended_at) < 20.0
    assert ("the budget of the job is spent" in job.said()) is (budget is not None)


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


LEAVES = (
    """
def leave(*_):
    (OUT / f"left-{RANK}-{INCARNATION}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
"""
    + SUCCEEDS
)


def test_a_node_that_is_warned_leaves_in_time_where_there_is_no_other(make_job: Callable[..., Job]) -> None:
    with metadata_service() as service:
        job = make_job(LEAVES)
        (job.engine.folder / "metadata").write_text(service.url)
        job.start("--hasty")
        job.file("began-0-1"), job.file("began-1-1")
        (job.engine.folder / "full").touch()
        service.announce(job.name(1), seconds=LEAVE_SECONDS + 3)
        job.file("left-1-1")
        (before,) = [one for one in job.presences() if (one.node_id, one.incarnation) == (1, 1)]
        assert before.leaves_at is not None
        assert time.time() >= before.leaves_at, "not before it had to"
        assert before.leaves_because.startswith("Preempt")
        (job.engine.folder / "full").unlink()
        job.file("began-1-2")
        (job.folder / "go").touch()
        status = job.ends()
        assert (status["state"], status["replacements"], status["preemptions"]) == ("succeeded", 0, 0), job.said()


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

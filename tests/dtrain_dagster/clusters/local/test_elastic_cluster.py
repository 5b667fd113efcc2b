"""Jobs that regroup: nodes that are lost are replaced, what could not regroup starts again, and each second is counted.

The commands are small scripts that end as the trainer would.
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.submit import LaunchSettings
from harness.waiting import until
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow

WORK = """
import json, signal
INCARNATION, LAUNCH, RUN = int(os.environ["DTRAIN_INCARNATION"]), int(os.environ["DTRAIN_LAUNCH"]), Path(__file__).stem
HOME = OUT / "home" / "storage" / "jobs" / RUN
def up():
    keep = ("RANK", "WORLD_", "LOCAL_", "NODE_", "MASTER_", "DTRAIN_LAUNCH", "DTRAIN_INCARNATION", "GLOO_", "OMP_")
    env = {name: value for name, value in os.environ.items() if name.startswith(keep)}
    file = OUT / f"up-{LAUNCH}-{RANK}-{INCARNATION}"
    (OUT / f"{file.name}.tmp").write_text(json.dumps({"pid": os.getpid(), "env": env}))
    (OUT / f"{file.name}.tmp").rename(file)
def done():
    (HOME / "result.json").write_text(json.dumps({"status": "succeeded"}))
def work():
    while not (OUT / "go").exists():
        time.sleep(0.01)
    if RANK == 0:
        done()
def leave(*_):
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
up()
"""


def nodes_of(cluster, job_id: str) -> list[NodePresence]:
    return RunDir(str(cluster.run_dir(job_id))).nodes()


def started(cluster, launch: int, rank: int, stay: int) -> dict[str, Any]:
    """Wait for a process, then its id and environment."""
    return json.loads(cluster.wait_for_file(f"up-{launch}-{rank}-{stay}").read_text())


def stays(cluster, job_id: str) -> list[tuple[int, int, int, tuple[int, ...]]]:
    return [(node.launch, node.node_id, node.incarnation, node.exit_codes) for node in nodes_of(cluster, job_id)]


@pytest.fixture
def elastic(cluster):
    """Submits a job that regroups, without waiting long for replacements."""
    manager = LocalClusterManager(
        cluster.manager.home, LaunchSettings(max_replacements=2, replacement_delay_seconds=0.1)
    )

    def submit(job_id: str, script: str, **fields: Any) -> None:
        manager.submit_job(cluster.spec(job_id, WORK + textwrap.dedent(script), elastic=True, **fields))

    cluster.manager = manager
    return submit


@pytest.mark.parametrize(
    ("how", "code"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (75, 75)],
    ids=["killed", "evicted", "lost its peers"],
)
def test_a_lost_node_is_replaced_by_one_like_it(cluster, elastic, how, code: int):
    script = """
    while INCARNATION == 1 and RANK == 1:
        if (OUT / "die").exists():
            sys.exit(75)
        time.sleep(0.01)
    work()
    """
    elastic("grows", script)
    first, other = started(cluster, 1, 1, 1), started(cluster, 1, 0, 1)
    if isinstance(how, signal.Signals):
        os.kill(first["pid"], how)
    else:
        (cluster.folder / "die").touch()
    second = started(cluster, 1, 1, 2)
    assert second["env"] == first["env"] | {"DTRAIN_INCARNATION": "2"}
    assert psutil.pid_exists(other["pid"])
    assert cluster.manager.job_status("grows").nodes_alive == 2
    assert "incarnation 2" in cluster.manager.monitor_health().nodes[1].message
    (cluster.folder / "go").touch()
    status = cluster.wait("grows")
    assert status.state is JobState.SUCCEEDED, status.message
    assert stays(cluster, "grows") == [(1, 0, 1, (0,)), (1, 1, 1, (code,)), (1, 1, 2, (0,))]
    assert cluster.status_file("grows")["replacements"] == 1
    log = cluster.manager.job_logs("grows", node_id=1).splitlines()
    assert [line.split(", 2")[0] for line in log if line.startswith("---")] == [
        "--- launch 1",
        "--- launch 1, incarnation 2",
    ]


def test_node_time_is_process_time_without_gap_or_overlap(cluster, elastic):
    elastic("paid", "print(time.time(), flush=True)\nwork()", nodes=2)
    for stay in (1, 2):
        victim = psutil.Process(started(cluster, 1, 1, stay)["pid"])
        os.kill(victim.pid, 9)
        until(lambda victim=victim: not victim.is_running(), "it to die")
    started(cluster, 1, 1, 3)
    (cluster.folder / "go").touch()
    assert cluster.wait("paid").state is JobState.SUCCEEDED
    seen = nodes_of(cluster, "paid")
    said = [float(line) for line in cluster.manager.job_logs("paid", node_id=1).splitlines() if "---" not in line]
    own = [node for node in seen if node.node_id == 1]
    for node, at in zip(own, said, strict=True):
        assert node.ended_at is not None
        assert node.started_at <= at <= node.ended_at
    assert own[0].ended_at < own[1].started_at < own[1].ended_at < own[2].started_at
    usage = cluster.manager.node_usage("paid")
    assert [(use.started_at, use.ended_at) for use in usage] == [(node.started_at, node.ended_at) for node in seen]


def test_a_node_is_lost_as_a_whole(cluster, elastic):
    elastic("whole", "work()", processes=2)
    for rank in range(4):
        started(cluster, 1, rank, 1)
    os.kill(started(cluster, 1, 3, 1)["pid"], 9)
    started(cluster, 1, 2, 2)
    started(cluster, 1, 3, 2)
    (cluster.folder / "go").touch()
    assert cluster.wait("whole").state is JobState.SUCCEEDED
    assert stays(cluster, "whole") == [(1, 0, 1, (0, 0)), (1, 1, 1, (143, -9)), (1, 1, 2, (0, 0))]


def test_when_no_replacement_is_left_the_others_go_on(cluster, elastic):
    elastic("fewer", "if RANK == 1: os.kill(os.getpid(), 9)\nwork()")
    until(lambda: len([n for n in nodes_of(cluster, "fewer") if n.exit_codes]) == 3, "all to be lost")
    health = cluster.manager.monitor_health()
    assert [node.healthy for node in health.nodes] == [True, False]
    (cluster.folder / "go").touch()
    status = cluster.wait("fewer")
    assert status.state is JobState.SUCCEEDED, status.message
    assert [node.incarnation for node in nodes_of(cluster, "fewer") if node.node_id == 1] == [1, 2, 3]


def test_an_error_of_the_users_own_code_ends_the_job_at_once(cluster, elastic):
    elastic("error", "if RANK == 1: sys.exit('no such column')\nwork()", env={"DTRAIN_PEER_GRACE_SECONDS": "0.1"})
    status = cluster.wait("error")
    assert status.state is JobState.FAILED
    assert "rank 1 on node 1 failed first (exit code 1)" in status.message
    assert "no such column" in status.message
    assert [node.incarnation for node in nodes_of(cluster, "error")] == [1, 1]


def test_the_one_with_the_error_is_blamed_and_not_one_that_was_killed_before(cluster, elastic):
    script = """
    if RANK == 0:
        os.kill(os.getpid(), 9)
    while not (OUT / "up-1-0-2").exists():
        time.sleep(0.01)
    sys.exit(2)
    """
    elastic("blame", script)
    status = cluster.wait("blame")
    assert "rank 1 on node 1 failed first (exit code 2, unusable" in status.message
    assert cluster.status_file("blame")["exit_code"] == 2


def test_what_cannot_regroup_starts_again_with_the_nodes_that_remain(cluster, elastic):
    script = "if LAUNCH == 1: os.kill(os.getpid(), 9) if RANK == 1 else sys.exit(75)\nwork()"
    manager = cluster.manager
    manager.settings = replace(manager.settings, replacement_delay_seconds=60.0)
    elastic("again", script, nodes=3)
    for rank in range(2):
        env = started(cluster, 2, rank, 1)["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["DTRAIN_LAUNCH"]) == (str(rank), "2", "2")
    assert manager.job_status("again").state is JobState.RUNNING
    assert manager.job_status("again").nodes_alive == 2
    (cluster.folder / "go").touch()
    assert cluster.wait("again").state is JobState.SUCCEEDED
    assert stays(cluster, "again") == [
        *((1, 0, 1, (75,)), (1, 1, 1, (-9,)), (1, 2, 1, (75,))),
        *((2, 0, 1, (0,)), (2, 1, 1, (0,))),
    ]
    assert json.loads((cluster.run_dir("again") / "launch.json").read_text())["node_count"] == 2


def test_it_starts_again_by_itself_three_times_and_no_more(cluster, elastic):
    elastic("never", "print('I see nobody'); sys.exit(75)", nodes=1)
    status = cluster.wait("never")
    assert status.state is JobState.FAILED
    assert "could not regroup, and starting them again did not help" in status.message
    assert "exit code 75, lost its peers or its device" in status.message
    assert status.message.endswith("I see nobody")
    assert [node.launch for node in nodes_of(cluster, "never")] == [1, 2, 3, 4]
    elastic("never", "work()", nodes=1)  # somebody looked
    started(cluster, 5, 0, 1)
    (cluster.folder / "go").touch()
    assert cluster.wait("never").state is JobState.SUCCEEDED


def test_when_all_nodes_are_gone_the_message_says_how_to_go_on(cluster, elastic):
    latest = 'json.dumps({"path": "checkpoints/g0001-s000000040", "step": 40})'
    save = f"(HOME / 'checkpoints').mkdir(exist_ok=True); (HOME / 'checkpoints/LATEST.json').write_text({latest})"
    cluster.manager.settings = replace(cluster.manager.settings, replacement_delay_seconds=60.0)
    elastic("gone", f"{save}\nos.kill(os.getpid(), 9)")
    status = cluster.wait("gone")
    assert status.state is JobState.FAILED
    assert cluster.status_file("gone")["launch"] == 4  # they were started again, as often as it may be
    assert "starting them again did not help (node 0: killed by SIGKILL; node 1: killed by SIGKILL)" in status.message
    kept = f"The checkpoint of step 40 is kept in {cluster.run_dir('gone')}/checkpoints/g0001-s000000040"
    assert f"{kept}: run `dtrain train --name gone` to resume from it" in status.message
    assert cluster.status_file("gone")["exit_code"] == 137


def test_evicted_is_not_failed_by_itself(cluster, elastic):
    cluster.manager.settings = replace(cluster.manager.settings, replacement_delay_seconds=60.0)
    elastic("evicted", "work()")
    for process in [started(cluster, 1, rank, 1)["pid"] for rank in range(2)]:
        os.kill(process, signal.SIGTERM)
    status = cluster.wait("evicted")
    assert status.state is JobState.FAILED
    assert status.message.startswith("evicted: all nodes were told to stop")
    assert "There is no checkpoint yet" in status.message
    assert cluster.status_file("evicted")["exit_code"] == 143


def test_a_cancel_replaces_nobody(cluster, elastic):
    elastic("cancelled", "work()")
    for rank in range(2):
        started(cluster, 1, rank, 1)
    cluster.manager.cancel_job("cancelled")
    assert cluster.processes() == []
    status = cluster.manager.job_status("cancelled")
    assert (status.state, status.message) == (JobState.CANCELLED, "cancelled")
    assert stays(cluster, "cancelled") == [(1, 0, 1, (143,)), (1, 1, 1, (143,))]


def test_exit_codes_of_zero_without_a_result_are_no_success(cluster, elastic):
    elastic("empty", "pass")
    status = cluster.wait("empty")
    assert status.state is JobState.FAILED
    assert "the result does not say that the training is complete" in status.message


def test_a_frozen_node_does_not_keep_a_job_that_is_done(cluster, elastic):
    grace = {"DTRAIN_PEER_GRACE_SECONDS": "0.1", "DTRAIN_STOP_GRACE_SECONDS": "0.1"}
    elastic("frozen", "work()", env=grace)
    frozen = started(cluster, 1, 1, 1)["pid"]
    started(cluster, 1, 0, 1)
    os.kill(frozen, signal.SIGSTOP)
    (cluster.folder / "go").touch()
    status = cluster.wait("frozen")
    assert status.state is JobState.SUCCEEDED, status.message
    until(lambda: cluster.processes() == [], "all to be gone")
    assert [node.exit_codes for node in nodes_of(cluster, "frozen")] == [(0,), (-9,)]


def test_a_replacement_that_cannot_be_started_is_as_one_that_is_lost(cluster, elastic, tmp_path: Path):
    program = tmp_path / "program.py"
    spec = cluster.spec("broken", WORK + "work()", elastic=True)
    program.write_text(f"#!{spec.command[0]}\n" + Path(spec.command[1]).read_text().replace("__file__", "'broken.py'"))
    program.chmod(0o755)
    cluster.manager.submit_job(replace(spec, command=(str(program),)))
    victim = started(cluster, 1, 1, 1)["pid"]
    started(cluster, 1, 0, 1)
    program.unlink()
    os.kill(victim, 9)
    until(lambda: len([n for n in nodes_of(cluster, "broken") if n.ended_at]) == 3, "both attempts")
    assert cluster.manager.job_status("broken").state is JobState.RUNNING
    (cluster.folder / "go").touch()
    status = cluster.wait("broken")
    assert status.state is JobState.SUCCEEDED, status.message


def test_a_job_that_has_spent_its_budget_is_neither_replaced_nor_started_again(cluster, elastic):
    """Whatever else its processes die of in that moment: a peer is lost, and one is killed."""
    elastic(
        "spent",
        """
        if RANK == 0:
            result = {"status": "budget", "error": "stopped at its budget", "launch": LAUNCH}
            (HOME / "result.json").write_text(json.dumps(result))
            sys.exit(77)
        while not (HOME / "result.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), 9) if RANK == 1 else sys.exit(75)
        """,
        nodes=3,
    )
    status = cluster.wait("spent")
    assert status.state is JobState.FAILED
    assert status.message.startswith("stopped at its budget. There is no checkpoint yet")
    assert stays(cluster, "spent") == [(1, 0, 1, (77,)), (1, 1, 1, (-9,)), (1, 2, 1, (75,))]
    assert cluster.status_file("spent")["exit_code"] == 77

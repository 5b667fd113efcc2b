"""The local cluster on real processes: what a job sees, how it ends, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from dtrain_dagster.clusters.base import ClusterError, JobSpec, JobState, Orphan
from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.waiting import until
from trainer.rundir import RunDir
from trainer.runtime.launch import Launch

pytestmark = pytest.mark.slow

SAY_WHO = """
import json
keep = ("RANK", "WORLD_", "LOCAL_", "NODE_", "GROUP_", "MASTER_", "OMP_", "DTRAIN_", "PYTHONUNBUFFERED", "MY_")
env = {name: value for name, value in os.environ.items() if name.startswith(keep)}
print("rank", RANK, "was here")
(OUT / f"rank-{RANK}.json").write_text(json.dumps({"env": env, "group": os.getpgid(0), "session": os.getsid(0)}))
"""
SLEEP = "(OUT / f'up-{RANK}').touch(); time.sleep(300)"


def test_each_node_is_a_process_group_with_torchruns_variables_and_its_own_log(cluster):
    cluster.submit("who", SAY_WHO, nodes=3, processes=2, env={"MY_SETTING": "7"})
    assert cluster.wait("who").state is JobState.SUCCEEDED
    ranks = [json.loads((cluster.folder / f"rank-{rank}.json").read_text()) for rank in range(6)]
    groups = [rank["group"] for rank in ranks]
    assert groups[0] == groups[1] != groups[2] == groups[3] != groups[4] == groups[5] != groups[0]
    assert os.getsid(0) not in {rank["session"] for rank in ranks}
    port = ranks[0]["env"]["MASTER_PORT"]
    for rank, seen in enumerate(ranks):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "NODE_RANK": str(rank // 2),
            "GROUP_RANK": str(rank // 2),
            "WORLD_SIZE": "6",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PYTHONUNBUFFERED": "1",
            "MY_SETTING": "7",
        }
        assert expected.items() <= seen["env"].items()
        assert int(seen["env"]["OMP_NUM_THREADS"]) >= 1
        assert not Launch.read(seen["env"]).is_elastic, "this command cannot regroup"
    manager = cluster.manager
    for node in range(3):
        said = manager.job_logs("who", node_id=node).splitlines()
        assert said[0].startswith("--- launch 1")
        assert sorted(said[1:]) == [f"rank {2 * node} was here", f"rank {2 * node + 1} was here"]
    assert manager.job_logs("who", tail=1).count("was here") == 3
    assert manager.job_logs("who", tail=1).startswith("=== node-0.log ===\nrank ")
    with pytest.raises(ClusterError, match="no log of a node 5"):
        manager.job_logs("who", node_id=5)


def test_the_process_that_fails_first_ends_the_job_and_is_named(cluster):
    script = """
    if RANK == 1:
        print("the disk of rank 1 melted")
        sys.exit(3)
    time.sleep(300)
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inherited by all that is started
    try:
        cluster.submit("fails", script, nodes=3, env={"DTRAIN_STOP_GRACE_SECONDS": "0.2"})
        status = cluster.wait("fails")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert status.state is JobState.FAILED
    assert "rank 1 on node 1 failed first (exit code 3)" in status.message
    assert "the disk of rank 1 melted" in status.message
    assert status.started_at is not None
    assert status.ended_at is not None
    written = cluster.status_file("fails")
    assert written["exit_code"] == 3
    assert written["exit_codes"] == {"0": -15, "1": 3, "2": -15}


def test_cancel_lets_processes_end_in_order_and_kills_what_does_not_children_included(cluster):
    script = """
    import signal, subprocess
    def stop(*_):
        (OUT / f"checkpoint-{RANK}").touch()
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop if RANK == 0 else signal.SIG_IGN)
    if RANK == 1 and len(sys.argv) == 1:  # a child of its own, as stubborn
        subprocess.Popen([sys.executable, __file__, "child"])
    (OUT / f"up-{RANK}-{len(sys.argv)}").touch()
    time.sleep(300)
    """
    cluster.submit("job", script, env={"DTRAIN_STOP_GRACE_SECONDS": "0.5"})
    for name in ("up-0-1", "up-1-1", "up-1-2"):
        cluster.wait_for_file(name)
    cluster.manager.cancel_job("job")
    assert cluster.processes() == []
    status = cluster.manager.job_status("job")
    assert (status.state, status.message, status.nodes_alive) == (JobState.CANCELLED, "cancelled", 0)
    assert (cluster.folder / "checkpoint-0").exists()
    assert [node.exit_codes for node in _nodes(cluster, "job")] == [(143,), (-9,)]
    cluster.manager.cancel_job("job")  # once more does no harm
    assert cluster.manager.job_status("job").state is JobState.CANCELLED


def test_a_stuck_supervisor_is_ended_by_force(cluster, monkeypatch):
    cluster.submit("stuck", SLEEP, env={"DTRAIN_STOP_GRACE_SECONDS": "0.2"})
    for rank in range(2):
        cluster.wait_for_file(f"up-{rank}")
    os.kill(cluster.status_file("stuck")["pid"], signal.SIGSTOP)
    monkeypatch.setattr("dtrain_dagster.clusters.managers.END_SECONDS", 0.1)
    assert not cluster.manager.end_orphan(Orphan(name="stuck", reason="")), "a sensor has no time to wait"
    monkeypatch.setattr("dtrain_dagster.clusters.supervision.launch.FORCE_SECONDS", 0.5)
    cluster.manager.cancel_job("stuck")
    assert cluster.processes() == []
    assert cluster.manager.job_status("stuck").state is JobState.FAILED


def test_a_job_outlives_whoever_submitted_it(cluster):
    spec = cluster.spec("long", "(OUT / 'up').touch()\nwhile not (OUT / 'go').exists(): time.sleep(0.02)")
    code = f"""
import os
os.setsid()
from pathlib import Path
from dtrain_dagster.clusters.base import JobSpec
from dtrain_dagster.clusters.managers import LocalClusterManager
LocalClusterManager(Path({str(cluster.manager.home)!r})).submit_job({spec!r})
os.killpg(0, 9)  # its whole group, as when a terminal is closed
"""
    submitter = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert submitter.returncode == -9, submitter.stderr
    cluster.wait_for_file("up")
    manager = LocalClusterManager(cluster.manager.home)
    assert manager.job_status("long").state is JobState.RUNNING
    assert [job.job_id for job in manager.list_jobs()] == ["long"]
    (cluster.folder / "go").touch()
    assert cluster.wait("long").state is JobState.SUCCEEDED


def test_a_failed_job_starts_again_as_the_next_launch(cluster):
    script = """
    lives = OUT / f"lives-{RANK}"
    open(lives, "a").write("x")
    print("life", len(lives.read_text()))
    sys.exit(0 if len(lives.read_text()) == 2 else 1)
    """
    cluster.submit("again", script)
    assert cluster.wait("again").state is JobState.FAILED
    cluster.submit("again", script)  # at once, while the last supervisor may still be on its way out
    assert cluster.wait("again").state is JobState.SUCCEEDED
    assert cluster.status_file("again")["launch"] == 2
    said = cluster.manager.job_logs("again", node_id=1)
    assert [line for line in said.splitlines() if line.startswith("life")] == [f"life {n}" for n in (1, 2)]
    usage = cluster.manager.node_usage("again")
    assert len(usage) == 4
    assert {use.node_id for use in usage} == {0, 1}
    assert all(use.ended_at > use.started_at and use.sku == "Standard_NC6s_v3" for use in usage)


def test_a_program_that_is_not_there_is_named(cluster):
    spec = JobSpec(job_id="none", run_dir=str(cluster.run_dir("none")), command=("no-such-program",), node_count=1)
    cluster.manager.submit_job(spec)
    status = cluster.wait("none")
    assert status.state is JobState.FAILED
    assert "cannot start 'no-such-program'" in status.message


def test_a_node_that_cannot_start_takes_those_before_it_along(cluster):
    (cluster.run_dir("half") / "logs" / "node-1.log").mkdir(parents=True)
    cluster.submit("half", SLEEP)
    status = cluster.wait("half")
    assert status.state is JobState.FAILED
    assert "node-1.log" in status.message
    until(lambda: cluster.processes() == [], "the supervisor to end")
    [node] = _nodes(cluster, "half")
    assert node.ended_at is not None
    assert node.exit_codes == (-15,) or node.exit_codes == (-9,)


def _nodes(cluster, job_id: str):
    return RunDir(str(cluster.run_dir(job_id))).nodes()

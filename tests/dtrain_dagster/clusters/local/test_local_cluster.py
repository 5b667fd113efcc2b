"""The local cluster on real processes: what a job sees, how it ends, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from dtrain_dagster.clusters.base import ClusterError, JobSpec, JobState, Orphan
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.support.job_lock import acquire, is_held
from harness.waiting import until
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow

SAY_WHO = """
import json
keep = ("RANK", "WORLD_", "LOCAL_", "NODE_", "GROUP_", "MASTER_", "OMP_", "DTRAIN_", "PYTHONUNBUFFERED", "MY_")
env = {name: value for name, value in os.environ.items() if name.startswith(keep)}
print("rank", RANK, "was here")
(OUT / f"rank-{RANK}.json").write_text(json.dumps({"env": env, "group": os.getpgid(0), "session": os.getsid(0)}))
"""
SLEEP = "(OUT / f'up-{RANK}').touch(); time.sleep(300)"
STUBBORN = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:  # a child of its own, as stubborn
    subprocess.Popen([sys.executable, __file__, "child"])
(OUT / f"up-{RANK}-{len(sys.argv)}").touch()
time.sleep(300)
"""


def submit_in_another_process(cluster, spec: JobSpec, first: str = "", then: str = "") -> subprocess.CompletedProcess:
    code = f"""
{first}
from pathlib import Path
from dtrain_dagster.clusters.base import JobSpec
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.submit import with_package
LocalClusterManager(Path({str(cluster.manager.home)!r})).submit_job({spec!r})
{then}
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


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
        assert not {"DTRAIN_LAUNCH", "DTRAIN_INCARNATION"} & set(seen["env"])  # this command cannot regroup
    for node in range(3):
        said = cluster.manager.job_logs("who", node_id=node).splitlines()
        assert said[0].startswith("--- launch 1")
        assert sorted(said[1:]) == [f"rank {2 * node} was here", f"rank {2 * node + 1} was here"]


def test_the_process_that_fails_first_ends_the_job_and_is_named(cluster):
    script = """
    if RANK == 1:
        print("the disk of rank 1 melted")
        sys.exit(3)
    time.sleep(300)
    """
    cluster.submit("fails", script, nodes=3, env={"DTRAIN_PEER_GRACE_SECONDS": "0.2"})
    status = cluster.wait("fails")
    assert status.state is JobState.FAILED
    assert "rank 1 on node 1 failed first (exit code 3)" in status.message
    assert "the disk of rank 1 melted" in status.message
    assert status.started_at is not None
    assert status.ended_at is not None
    written = cluster.status_file("fails")
    assert written["exit_code"] == 3
    assert written["exit_codes"] == {"0": -15, "1": 3, "2": -15}


def test_cancel_lets_processes_end_in_order(cluster):
    script = """
    import signal
    def stop(*_):
        (OUT / f"checkpoint-{RANK}").touch()
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    (OUT / f"up-{RANK}").touch()
    time.sleep(300)
    """
    cluster.submit("polite", script)
    for rank in range(2):
        cluster.wait_for_file(f"up-{rank}")
    cluster.manager.cancel_job("polite")
    assert cluster.processes() == []
    status = cluster.manager.job_status("polite")
    assert (status.state, status.message, status.nodes_alive) == (JobState.CANCELLED, "cancelled", 0)
    assert sorted(path.name for path in cluster.folder.glob("checkpoint-*")) == ["checkpoint-0", "checkpoint-1"]
    assert [node.exit_codes for node in _nodes(cluster, "polite")] == [(143,), (143,)]
    cluster.manager.cancel_job("polite")  # once more does no harm
    assert cluster.manager.job_status("polite").state is JobState.CANCELLED


def test_cancel_kills_what_ignores_sigterm_children_of_processes_included(cluster):
    cluster.submit("stubborn", STUBBORN, env={"DTRAIN_STOP_GRACE_SECONDS": "0.3"})
    for rank in range(2):
        cluster.wait_for_file(f"up-{rank}-2")
    assert len([p for p in cluster.processes() if "stubborn.py" in " ".join(p.cmdline())]) == 4
    cluster.manager.cancel_job("stubborn")
    assert cluster.processes() == []
    assert cluster.manager.job_status("stubborn").state is JobState.CANCELLED


def test_a_supervisor_killed_by_force_leaves_no_orphan_and_a_failed_job(cluster):
    cluster.submit("orphans", STUBBORN)
    for rank in range(2):
        cluster.wait_for_file(f"up-{rank}-2")
    assert cluster.manager.job_status("orphans").nodes_alive == 2
    os.kill(cluster.status_file("orphans")["pid"], 9)
    status = cluster.wait("orphans")
    assert cluster.processes() == []  # only then is the job said to have ended
    assert status.state is JobState.FAILED
    assert "the supervisor died" in status.message
    nodes = _nodes(cluster, "orphans")
    assert all(node.ended_at > node.last_seen_at for node in nodes)  # its reaper saw their end
    assert [usage.ended_at for usage in cluster.manager.node_usage("orphans")] == [node.ended_at for node in nodes]
    cluster.submit("orphans", "print('second life')")
    assert cluster.wait("orphans").state is JobState.SUCCEEDED


def test_a_stuck_supervisor_is_ended_by_force(cluster, monkeypatch):
    cluster.submit("stuck", SLEEP, env={"DTRAIN_STOP_GRACE_SECONDS": "0.2"})
    for rank in range(2):
        cluster.wait_for_file(f"up-{rank}")
    os.kill(cluster.status_file("stuck")["pid"], signal.SIGSTOP)
    monkeypatch.setattr("dtrain_dagster.clusters.supervision.manager.END_SECONDS", 0.1)
    assert not cluster.manager.end_orphan(Orphan(name="stuck", reason="")), "a sensor has no time to wait"
    monkeypatch.setattr("dtrain_dagster.clusters.supervision.settle.FORCE_SECONDS", 0.5)
    cluster.manager.cancel_job("stuck")
    assert cluster.processes() == []
    assert cluster.manager.job_status("stuck").state is JobState.FAILED


def test_a_job_outlives_whoever_submitted_it(cluster):
    spec = cluster.spec("long", "(OUT / 'up').touch()\nwhile not (OUT / 'go').exists(): time.sleep(0.02)")
    # Its whole group, as when a terminal is closed.
    submitter = submit_in_another_process(cluster, spec, first="import os; os.setsid()", then="os.killpg(0, 9)")
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


def test_asking_while_a_job_starts_never_says_failed_and_stops_no_submission(cluster):
    seen, done = set(), threading.Event()

    def ask() -> None:
        manager = LocalClusterManager(cluster.manager.home)
        while not done.wait(0.01):
            seen.update(job.state for job in manager.list_jobs())

    askers = [threading.Thread(target=ask)]
    for asker in askers:
        asker.start()
    try:
        for number in range(3):
            cluster.submit(f"job-{number}", "pass", nodes=1)
        ends = [cluster.wait(f"job-{number}").state for number in range(3)]
    finally:
        done.set()
        for asker in askers:
            asker.join()
    assert ends == [JobState.SUCCEEDED] * 3
    assert JobState.FAILED not in seen


def test_a_submitter_that_dies_before_the_start_leaves_a_job_that_can_be_submitted(cluster):
    folder = cluster.run_dir("unborn")
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text('{"submitted_at": 1.0}')
    lock = acquire(folder)
    assert cluster.manager.job_status("unborn").state is JobState.QUEUED
    os.close(lock)
    status = cluster.manager.job_status("unborn")
    assert status.state is JobState.FAILED
    assert "never started" in status.message
    cluster.submit("unborn", "pass")
    assert cluster.wait("unborn").state is JobState.SUCCEEDED


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


def test_a_bad_grace_is_named(cluster):
    cluster.submit("grace", "pass", env={"DTRAIN_STOP_GRACE_SECONDS": "soon"})
    assert "DTRAIN_STOP_GRACE_SECONDS='soon' must be a number of seconds" in cluster.wait("grace").message


def test_logs_of_a_finished_job(cluster):
    cluster.submit("talks", "for n in range(3000): print('line', RANK, n)")
    cluster.wait("talks")
    manager = cluster.manager
    assert manager.job_logs("talks", node_id=1, tail=2) == "line 1 2998\nline 1 2999"
    assert manager.job_logs("talks", tail=1).splitlines() == [
        "=== node-0.log ===",
        "line 0 2999",
        "=== node-1.log ===",
        "line 1 2999",
    ]
    assert len(manager.job_logs("talks", node_id=0).splitlines()) == 3001
    with pytest.raises(ClusterError, match="no log of a node 5"):
        manager.job_logs("talks", node_id=5)


def test_what_a_process_said_last_is_kept(cluster):
    cluster.submit("last", "print('x' * 300_000); print('no newline', end=''); os.kill(os.getpid(), 9)", nodes=1)
    message = cluster.wait("last").message
    assert message.endswith("no newline")
    assert (cluster.manager.folder / "last" / "logs" / "node-0.log").stat().st_size > 300_000
    shown = cluster.manager.job_logs("last", node_id=0)
    assert "bytes more" in shown, "a line that no terminal could show is cut, in words"
    assert shown.endswith("no newline")


def test_health_says_which_node_works_on_what_and_which_left(cluster):
    manager = cluster.manager
    assert manager.monitor_health().message == "not provisioned"
    manager.provision_cluster(3, "Standard_NC6s_v3")
    assert [node.message for node in manager.monitor_health().nodes] == ["ready"] * 3
    script = "(OUT / f'up-{RANK}').touch()\nsys.exit(5) if RANK == 1 else time.sleep(300)"
    cluster.submit("work", script, env={"DTRAIN_PEER_GRACE_SECONDS": "60"})
    path = cluster.run_dir("work") / "nodes" / "l0001-n001-s001.json"
    while not (path.exists() and json.loads(path.read_text())["ended_at"]):
        cluster.wait_for_file("up-1")
    health = manager.monitor_health()
    assert not health.healthy
    assert health.running_jobs == ("work",)
    messages = ["works on work", "left work with exit codes 5", "ready"]
    assert [node.message for node in health.nodes] == messages
    assert [node.healthy for node in health.nodes] == [True, False, True]
    assert manager.job_status("work").nodes_alive == 1


def test_scaling_is_remembered_and_clean_up_stops_all(cluster):
    manager = cluster.manager
    with pytest.raises(ClusterError, match="not provisioned"):
        manager.scale_cluster(2)
    config = manager.provision_cluster(2, "Standard_NC6s_v3")
    assert manager.scale_cluster(3)
    assert not manager.scale_cluster(3)
    assert len(LocalClusterManager(manager.home).monitor_health().nodes) == 3
    with pytest.raises(ClusterError, match=f"0 to {config.max_nodes}"):
        manager.scale_cluster(config.max_nodes + 1)
    for name in ("a", "b"):
        cluster.submit(name, SLEEP, nodes=1)
    cluster.submit("done", "pass", nodes=1)
    cluster.wait("done")
    manager.cleanup_cluster()
    assert cluster.processes() == []
    states = {job.job_id: job.state for job in manager.list_jobs()}
    assert states == {"a": JobState.CANCELLED, "b": JobState.CANCELLED, "done": JobState.SUCCEEDED}
    assert manager.monitor_health().message == "not provisioned"
    manager.cleanup_cluster()


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_running(cluster):
    spec = cluster.spec("full", "pass")
    # No file may grow: every write fails, as on a full disk.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    submitter = submit_in_another_process(cluster, spec, first=limit)
    assert submitter.returncode == 1
    assert "ClusterError: cannot write the run directory" in submitter.stderr
    assert cluster.processes() == []
    cluster.manager.submit_job(spec)
    assert cluster.wait("full").state is JobState.SUCCEEDED


def _nodes(cluster, job_id: str):
    return RunDir(str(cluster.run_dir(job_id))).nodes()


class TestMarksOfActiveJobs:
    def test_are_made_before_the_launch_and_go_when_somebody_sees_the_end(self, cluster):
        manager = cluster.manager
        assert manager.active_jobs() == []
        cluster.submit("long", SLEEP, nodes=1)
        cluster.submit("short", "pass", nodes=1)
        assert cluster.wait("short").state is JobState.SUCCEEDED
        assert manager.active.marks() == ["long", "short"]
        until(lambda: not is_held(cluster.run_dir("short")), "its supervisor's end")
        assert [job.job_id for job in manager.active_jobs()] == ["long"]
        assert manager.active.marks() == ["long"]
        assert manager.use.used_at() == manager.job_status("short").ended_at

    def test_a_submitter_that_died_leaves_a_mark_that_costs_one_look(self, cluster):
        manager = cluster.manager
        manager.active_jobs()
        first = "SupervisedClusterManager._launch = lambda self, *_: (self.active.enter('gone'), os._exit(9))"
        first = f"import os\nfrom dtrain_dagster.clusters.supervision.manager import SupervisedClusterManager\n{first}"
        assert submit_in_another_process(cluster, cluster.spec("gone", "pass"), first=first).returncode == 9
        manager.active.enter("of-a-folder-that-was-removed")
        assert manager.active_jobs() == []
        assert manager.active.marks() == []

    def test_a_job_that_is_started_again_keeps_its_mark_whoever_sees_the_last_end_late(self, cluster, monkeypatch):
        manager = cluster.manager
        assert manager.active_jobs() == []
        script = "if not (OUT / 'again').exists(): sys.exit(3)\n" + SLEEP
        cluster.submit("job", script, nodes=1)
        assert cluster.wait("job").state is JobState.FAILED
        until(lambda: not is_held(cluster.run_dir("job")), "its supervisor's end")
        (cluster.folder / "again").touch()
        submitter = threading.Thread(target=cluster.submit, args=("job", script), kwargs={"nodes": 1})
        leave = manager.active.leave

        def late(mark: str) -> None:
            submitter.start()
            submitter.join(1.0)  # it has made its mark by now, if nothing holds it
            leave(mark)

        with monkeypatch.context() as patch:
            patch.setattr(manager.active, "leave", late)
            assert manager.active_jobs() == []
        submitter.join()
        assert [job.job_id for job in manager.active_jobs()] == ["job"]

    def test_jobs_from_before_there_were_marks_are_found(self, cluster):
        cluster.submit("long", SLEEP, nodes=1)
        cluster.manager.active.storage.delete("")
        assert [job.job_id for job in cluster.manager.active_jobs()] == ["long"]
        assert cluster.manager.active.marks() == ["long"]

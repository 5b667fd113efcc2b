"""Nothing outlives its job: not what left its group, its session or its parent, even if its supervisor is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.supervision.launch import new_token, settle_status
from harness.waiting import until
from trainer.node.processes import MARK, descendants, kill_all, marked
from trainer.rundir import LAUNCH, RunDir

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

DAEMON = """
import socket, subprocess
# A daemon: a session of its own, its parent gone, and a port that it holds.
code = '''
import os, socket, sys, time
os.setsid()
if os.fork():
    os._exit(0)
held = socket.create_server(("127.0.0.1", 0))
from pathlib import Path
path = Path(sys.argv[1])
path.with_suffix(".tmp").write_text(f"{os.getpid()} {held.getsockname()[1]}")
path.with_suffix(".tmp").rename(path)
time.sleep(300)
'''
def daemon(name, **options):
    subprocess.run([sys.executable, "-c", code, str(OUT / name)], check=True, **options)
"""


def daemon_of(cluster, name: str) -> tuple[psutil.Process, int]:
    """Its process and its port."""
    pid, port = map(int, cluster.wait_for_file(name).read_text().split())
    process = psutil.Process(pid)
    assert os.getsid(pid) != os.getsid(0)
    return process, port


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


@pytest.fixture
def daemons(cluster):
    """A job of two nodes that each start a daemon: with their environment, and with none."""
    script = f"{DAEMON}\ndaemon(f'daemon-{{RANK}}')\ndaemon(f'bare-{{RANK}}', env={{}})\n"

    def start(then: str) -> list[tuple[psutil.Process, int]]:
        cluster.submit("job", script + then, env={"DTRAIN_STOP_GRACE_SECONDS": "0.3"})
        return [daemon_of(cluster, f"{kind}-{rank}") for rank in range(2) for kind in ("daemon", "bare")]

    yield start
    for name in cluster.folder.glob("bare-[01]"):  # what nobody was left to find
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(name.read_text().split()[0]), signal.SIGKILL)


def check_gone(cluster, found: list[tuple[psutil.Process, int]]) -> None:
    assert [process for process, _ in found if runs(process)] == []
    assert all(is_free(port) for _, port in found)
    until(lambda: cluster.processes() == [], "the supervisor to end")


def test_of_a_killed_supervisor(cluster, daemons):
    found = daemons("time.sleep(300)")
    os.kill(cluster.status_file("job")["pid"], signal.SIGKILL)
    status = cluster.wait("job")  # whoever asks next ends what is left
    assert (status.state, "the supervisor died" in status.message) == (JobState.FAILED, True)
    # A daemon that has even shed its mark had only the supervisor to be found by.
    marked, bare = found[::2], found[1::2]
    assert [process for process, _ in marked if runs(process)] == []
    assert all(is_free(port) for _, port in marked)
    assert {process.pid for process in cluster.processes()} <= {process.pid for process, _ in bare}
    cluster.submit("job", "print('second life')")
    assert cluster.wait("job").state is JobState.SUCCEEDED


def test_of_a_supervisor_that_is_killed_before_it_records_that_it_has_the_job(tmp_path: Path):
    rundir = RunDir(str(tmp_path))
    rundir.write_json(LAUNCH, {"token": (token := new_token(tmp_path)), "launch": 1})
    left, other = (
        subprocess.Popen(["sleep", "300"], env={MARK: f"{mark}-1-0-1"}) for mark in (token, new_token(tmp_path))
    )
    try:
        until(lambda: marked(token) == {left.pid}, "it to start")
        assert settle_status(rundir) is None
        assert left.wait(10) == -signal.SIGKILL
        assert other.poll() is None, "it is of another launch"
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_of_a_job_that_succeeds(cluster, daemons):
    found = daemons("pass")
    assert cluster.wait("job").state is JobState.SUCCEEDED
    check_gone(cluster, found)


def test_of_one_node_while_the_others_go_on(cluster):
    script = """
    from trainer.runtime.launch import Launch
    daemon(f"daemon-{RANK}-{Launch.read(os.environ).incarnation}")
    (OUT / f"pid-{RANK}").write_text(str(os.getpid()))
    time.sleep(300)
    """
    cluster.submit("job", DAEMON + textwrap.dedent(script), elastic=True, env={"DTRAIN_STOP_GRACE_SECONDS": "0.1"})
    lost, port = daemon_of(cluster, "daemon-1-1")
    kept, _ = daemon_of(cluster, "daemon-0-1")
    until(lambda: cluster.wait_for_file("pid-1").read_text(), "the leader's id")
    os.kill(int((cluster.folder / "pid-1").read_text()), signal.SIGKILL)
    new, _ = daemon_of(cluster, "daemon-1-2")
    assert not runs(lost)
    assert is_free(port)
    assert runs(kept)
    assert runs(new)
    _, first, second = RunDir(str(cluster.run_dir("job"))).nodes()
    assert first.ended_at < second.started_at
    cluster.manager.cancel_job("job")
    check_gone(cluster, [(lost, port), (kept, port), (new, port)])


def test_orphans_that_end_leave_no_zombies(cluster):
    script = """
    import subprocess
    code = "import os, time; pid = os.fork() or os.getpid(); os.write(1, b'%d ' % pid); time.sleep(0.3)"
    said = subprocess.run([sys.executable, "-S", "-c", code], check=True, stdout=subprocess.PIPE).stdout
    (OUT / "up").write_bytes(said)
    while not (OUT / "go").exists():
        time.sleep(0.02)
    """
    cluster.submit("zombies", script, nodes=1)
    until(lambda: cluster.wait_for_file("up").read_text(), "the orphan's id")
    orphan = int((cluster.folder / "up").read_text().split()[0])
    until(lambda: not psutil.pid_exists(orphan), "it to be seen")
    (cluster.folder / "go").touch()
    assert cluster.wait("zombies").state is JobState.SUCCEEDED


def test_a_node_is_paid_until_its_last_child_is_gone(cluster):
    script = """
    import signal, subprocess
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    (OUT / "ended").write_text(str(time.time()))
    """
    cluster.submit("child", script, nodes=1, env={"DTRAIN_STOP_GRACE_SECONDS": "0.5"})
    assert cluster.wait("child").state is JobState.SUCCEEDED
    [node] = RunDir(str(cluster.run_dir("child"))).nodes()
    assert node.exit_codes == (0,)
    assert node.ended_at - float((cluster.folder / "ended").read_text()) > 0.5


def test_processes_are_found_by_mark_and_by_descent(tmp_path: Path):
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], env={})"
    command = [sys.executable, "-c", f"{child}; print(1, flush=True); input()"]
    pipe = subprocess.PIPE
    mark = f"mark-of-{os.getpid()}-1-"
    parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={MARK: mark}, start_new_session=True)
    try:
        assert parent.stdout.readline() == b"1\n"
        assert marked(mark) == {parent.pid}
        assert marked(mark[:-1]) == {parent.pid}
        assert marked(f"{mark}0") == set()
        [below] = psutil.Process(parent.pid).children()
        assert descendants(parent.pid, mark) == {below.pid}
        assert {parent.pid, below.pid} <= descendants(os.getpid(), mark)
        assert parent.pid not in descendants(os.getpid(), "another")
    finally:
        assert kill_all(lambda: descendants(os.getpid(), mark) & {parent.pid, below.pid}, 10.0)
        parent.wait()

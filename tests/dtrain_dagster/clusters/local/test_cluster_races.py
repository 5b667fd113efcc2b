"""What happens to a job at bad moments: a slow disk, a flood of output, a reaper that is gone, a strange parent."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import threading
from pathlib import Path

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from harness.waiting import until
from trainer.node.line_log import PIPE_BYTES, LineLog

pytestmark = pytest.mark.slow


def in_supervisors(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run this in every supervisor that is started from now on, before anything else."""
    folder = tmp_path / "site"
    folder.mkdir()
    start = "import os, sys\nif 'dtrain_dagster.clusters.supervise' in sys.orig_argv:\n"
    (folder / "sitecustomize.py").write_text(start + textwrap.indent(code, "    "))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_failure_while_another_nodes_end_is_being_written_is_not_lost(cluster, monkeypatch, tmp_path: Path):
    in_supervisors(  # a slow disk
        "import time\nreal = os.fsync\nos.fsync = lambda file: (time.sleep(0.4), real(file))[1]", tmp_path, monkeypatch
    )
    nodes = cluster.run_dir("late") / "nodes"
    script = f"""
    def being_written():
        for path in Path({str(nodes)!r}).glob("l0001-n001-s001.json.*.tmp"):
            try:
                if '"ended_at": null' not in path.read_text() and path.read_text():
                    return True
            except FileNotFoundError:
                pass
    while RANK == 0:
        if being_written():
            sys.exit(3)
        time.sleep(0.005)
    """
    cluster.submit("late", script)
    status = cluster.wait("late")
    assert status.state is JobState.FAILED
    assert "rank 0 on node 0 failed first (exit code 3)" in status.message


def test_exit_codes_are_seen_even_if_the_submitter_ignores_its_children(cluster):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inherited by all that is started
    try:
        cluster.submit("ignored", "time.sleep(0.2); sys.exit(5)", nodes=1)
        assert "exit code 5" in cluster.wait("ignored").message
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert cluster.manager.job_status("ignored").state is JobState.FAILED


def test_the_group_of_a_node_that_has_ended_is_not_signalled_later(cluster, monkeypatch, tmp_path: Path):
    """Its number may be someone else's by then."""
    signals = tmp_path / "signals"
    spy = f"""
def killpg(group, number, real=os.killpg):
    with open({str(signals)!r}, "a") as file:
        file.write(f"{{group}} {{int(number)}}\\n")
    real(group, number)
os.killpg = killpg"""
    in_supervisors(spy, tmp_path, monkeypatch)
    cluster.submit("early", "(OUT / f'group-{RANK}').write_text(str(os.getpgid(0)))\nif RANK == 1: time.sleep(300)")
    groups = [cluster.wait_for_file(f"group-{rank}") for rank in range(2)]
    until(lambda: all(path.read_text() for path in groups), "the groups")
    early, late = (path.read_text() for path in groups)
    # Signal 0 only asks whether there is such a group. It was asked once, and there was none.
    until(lambda: signals.exists() and f"{early} 0" in signals.read_text(), "the end of node 0 to be seen")
    cluster.manager.cancel_job("early")
    said = signals.read_text().splitlines()
    assert f"{late} {int(signal.SIGTERM)}" in said
    assert [line for line in said if line.split()[0] == early] == [f"{early} 0"]


def test_racing_submitters_start_a_job_once(cluster):
    script = "open(OUT / 'starts', 'a').write('x')\nwhile not (OUT / 'go').exists(): time.sleep(0.02)"
    spec = cluster.spec("once", script, nodes=1)
    managers = [LocalClusterManager(cluster.manager.home) for _ in range(3)]
    racers = [threading.Thread(target=manager.submit_job, args=(spec,)) for manager in managers]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    (cluster.folder / "go").touch()
    assert cluster.wait("once").state is JobState.SUCCEEDED
    cluster.manager.submit_job(spec)  # after it has succeeded
    assert cluster.manager.job_status("once").state is JobState.SUCCEEDED
    assert (cluster.folder / "starts").read_text() == "x"


def test_a_flood_of_output_neither_stops_the_watching_nor_fills_the_memory(tmp_path: Path):
    log = LineLog(tmp_path / "node-0.log", "start")
    pipe = log.open_pipe()
    flood = subprocess.Popen(["yes", "x" * 4000], stdout=pipe)
    os.close(pipe)
    try:
        for _ in range(5):
            before = (tmp_path / "node-0.log").stat().st_size
            log.pump()
            assert (tmp_path / "node-0.log").stat().st_size - before <= 5 * PIPE_BYTES
    finally:
        flood.kill()
        flood.wait()
    log.close()

"""What happens to a job at bad moments: several submitters, a flood of output, a strange parent."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from trainer.node.environment import Seat
from trainer.node.line_log import PIPE_BYTES, LineLog
from trainer.node.node_processes import NodeProcesses

pytestmark = pytest.mark.slow


def test_the_group_of_a_node_that_has_ended_is_not_signalled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its number may be someone else's by then."""
    node = NodeProcesses(Seat(node_id=0), LineLog(tmp_path / "node-0.log", "start"), "a mark of nobody", 1)
    node.group = os.getpgrp()
    signals: list[int] = []
    monkeypatch.setattr("trainer.node.node_processes.signal_group", lambda group, number: signals.append(number))
    node.gone_at = 1.0
    node.end(0.0)
    assert not node.look()
    assert signals == []
    node.gone_at = None
    node.end(60.0)
    assert signals == [signal.SIGTERM]


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

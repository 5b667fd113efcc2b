"""Jobs that regroup: nodes that are lost are replaced, what could not regroup starts again, and each second is counted.

The commands are small scripts that end as the trainer would.
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
from dataclasses import replace
from typing import Any

import psutil
import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from harness.waiting import until
from trainer.documents.presences import NodePresence
from trainer.rundir import RunDir
from trainer.runtime.launch import Launch

pytestmark = pytest.mark.slow

WORK = """
import json, signal
from trainer.runtime.launch import Launch
told = Launch.read(os.environ)
INCARNATION, LAUNCH, RUN = told.incarnation, told.number, Path(__file__).stem
HOME = OUT / "home" / "storage" / "jobs" / RUN
def up():
    keep = ("RANK", "WORLD_", "LOCAL_", "NODE_", "MASTER_", "DTRAIN_LAUNCH", "GLOO_", "OMP_")
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


def test_a_lost_node_is_replaced_as_a_whole_by_one_like_it(cluster, elastic):
    elastic("grows", "work()", processes=2)
    first, _, _, other = (started(cluster, 1, rank, 1) for rank in (3, 2, 1, 0))
    os.kill(first["pid"], signal.SIGKILL)
    second = started(cluster, 1, 3, 2)
    started(cluster, 1, 2, 2)
    assert second["env"] == first["env"] | replace(Launch.read(first["env"]), incarnation=2).variables()
    assert psutil.pid_exists(other["pid"])
    assert cluster.manager.job_status("grows").nodes_alive == 2
    assert "incarnation 2" in cluster.manager.monitor_health().nodes[1].message
    (cluster.folder / "go").touch()
    status = cluster.wait("grows")
    assert status.state is JobState.SUCCEEDED, status.message
    assert stays(cluster, "grows") == [(1, 0, 1, (0, 0)), (1, 1, 1, (143, -9)), (1, 1, 2, (0, 0))]
    _, lost, there = nodes = nodes_of(cluster, "grows")
    assert lost.started_at < lost.ended_at < there.started_at < there.ended_at, "no second is paid twice"
    usage = cluster.manager.node_usage("grows")
    assert [(use.started_at, use.ended_at) for use in usage] == [(node.started_at, node.ended_at) for node in nodes]
    assert cluster.status_file("grows")["replacements"] == 1
    log = cluster.manager.job_logs("grows", node_id=1).splitlines()
    assert [line.split(", 2")[0] for line in log if line.startswith("---")] == [
        "--- launch 1",
        "--- launch 1, incarnation 2",
    ]


def test_a_frozen_node_does_not_keep_a_job_that_is_done(cluster, elastic):
    grace = {"DTRAIN_STOP_GRACE_SECONDS": "0.1"}
    elastic("frozen", "work()", env=grace)
    frozen = started(cluster, 1, 1, 1)["pid"]
    started(cluster, 1, 0, 1)
    os.kill(frozen, signal.SIGSTOP)
    (cluster.folder / "go").touch()
    status = cluster.wait("frozen")
    assert status.state is JobState.SUCCEEDED, status.message
    until(lambda: cluster.processes() == [], "all to be gone")
    assert [node.exit_codes for node in nodes_of(cluster, "frozen")] == [(0,), (-9,)]

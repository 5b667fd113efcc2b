"""The engine on a real SLURM through a real sshd: one connection for all commands, a person's profile on the login node
changes nothing, and its loss loses no node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.supervision.engine import EngineJob
from dtrain_dagster.settings.slurm import SlurmSettings
from harness.engines.login_node import NAME, LoginNode, missing
from harness.engines.slurm_cluster import SlurmCluster
from harness.waiting import until

pytestmark = pytest.mark.slow
PROFILE = {
    "SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "COMPLETED", "SQUEUE_SORT": "i", "SBATCH_PARTITION": "nix",
    "SBATCH_REQUEUE": "1", "SACCT_FORMAT": "jobid", "SCANCEL_STATE": "PENDING", "SLURM_TIME_FORMAT": "relative",
}  # fmt: skip
"""What a person's profile on the login node may say to SLURM's commands."""


@pytest.fixture(scope="module")
def login(slurm: SlurmCluster) -> Iterator[LoginNode]:
    """A login node of the cluster; this machine itself has none of SLURM's commands on its path."""
    if why := missing():
        pytest.skip(why)
    names = ("PATH", "LD_LIBRARY_PATH", "SLURM_CONF")
    there = {name: value for name, value in slurm.environment().items() if name in names}
    with LoginNode({**there, **PROFILE}) as node, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{node.programs}:/usr/bin:/bin")
        patch.setenv("TMPDIR", str(node.folder))  # where the connection is kept
        patch.setattr("tempfile.tempdir", None)
        yield node


@pytest.fixture
def engine(login: LoginNode, tmp_path: Path) -> SlurmEngine:
    shell = "trap 'echo ends in order; kill $!; exit 143' TERM; echo it has $GIVEN; sleep 100 & wait"
    options = SlurmSettings(host=NAME, setup="export GIVEN='a b'", time_limit_minutes=5)
    return SlurmEngine(options, str(tmp_path), lambda *_: ["/bin/sh", "-c", shell])


def wait_for(engine: SlurmEngine, launch: dict[str, Any], state: str) -> EngineJob:
    jobs = until(lambda: [job for job in engine.list_jobs(launch) if job.state == state], state, pause=0.2)
    assert len(jobs) == 1
    return jobs[0]


def test_a_node_runs_and_ends_over_one_connection_whatever_a_profile_says(
    login: LoginNode, engine: SlurmEngine
) -> None:
    before = login.log().count("Accepted publickey")
    launch = {"token": os.urandom(24).hex(), "launch": 1, "node_count": 1}
    assert "slurm" in engine.check()
    first = engine.submit(launch, 0, 1)
    assert engine.submit(launch, 0, 1) == first
    job = wait_for(engine, launch, "running")
    assert job.started_at is not None
    assert job.ends_at == job.started_at + 300
    until(lambda: "it has a b" in (engine.read_log(first) or ""), "its output", pause=0.1)
    engine.cancel([first], force=False)
    job = wait_for(engine, launch, "ended")
    assert (job.exit_code, job.lost) == (143, False)
    assert "ends in order" in (engine.read_log(first) or "")
    assert login.log().count("Accepted publickey") <= before + 1

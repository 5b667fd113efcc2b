"""What the local cluster refuses: each message names the setting and the remedy; nothing starts, nothing is written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain_dagster.clusters.base import ClusterError, JobSpec, JobState
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.clusters.supervision.local_placer import LocalPlacer
from trainer.rundir import RunDir
from trainer.runtime.clock import SteadyClock


def test_no_nodes(cluster):
    with pytest.raises(ClusterError, match=r"DTRAIN_NODES=0.*set 1 or more"):
        cluster.manager.provision_cluster(0, "Standard_NC6s_v3")
    with pytest.raises(ClusterError, match="DTRAIN_NODES=0"):
        cluster.submit("zero", "pass", nodes=0)
    assert not cluster.manager.home.exists()


def test_more_processes_than_the_machine_can_carry(cluster):
    per_node = 4 * (os.cpu_count() or 1)
    manager = LocalClusterManager(cluster.manager.home, processes_per_node=per_node)
    assert manager.provision_cluster(2, "Standard_NC6s_v3").max_nodes == 2
    with pytest.raises(ClusterError, match=rf"DTRAIN_NODES=3 x DTRAIN_PROCESSES_PER_NODE={per_node} .* fewer"):
        manager.provision_cluster(3, "Standard_NC6s_v3")


def test_a_machine_that_fails_its_pre_flight_starts_no_node(cluster):
    check = "quick: echo the scratch disk is broken; exit 1"
    cluster.manager.settings = replace(cluster.manager.settings, preflight=check)
    cluster.submit("unfit", "(OUT / 'began').touch()")
    status = cluster.wait("unfit")
    assert status.state is JobState.FAILED
    assert "failed its pre-flight: the site's own check: the scratch disk is broken" in status.message
    assert "DTRAIN_PREFLIGHT=off" in status.message
    assert not (cluster.folder / "began").exists()


def test_a_machine_with_little_room_is_warned_of_unless_a_pre_flight_was_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("trainer.node.preflight_measures.available_bytes", lambda: 1 << 20)
    secret: Any = SimpleNamespace(renew=lambda: None)
    placer = LocalPlacer(RunDir(str(tmp_path)), secret, SteadyClock.begin())
    placer.begin_launch({"master_port": None})
    assert capsys.readouterr().out.startswith("pre-flight warning: 1 MiB of memory")


def test_a_run_directory_elsewhere(cluster, tmp_path):
    for run_dir in (str(tmp_path / "elsewhere"), "memory://jobs/x"):
        spec = JobSpec(job_id="x", run_dir=run_dir, command=("true",), node_count=1)
        with pytest.raises(ClusterError, match="keeps job 'x' in"):
            cluster.manager.submit_job(spec)


def test_an_unwritable_home(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    manager = LocalClusterManager(tmp_path / "file" / "home")
    spec = JobSpec(job_id="x", run_dir=str(manager.folder / "x"), command=("true",), node_count=1)
    with pytest.raises(ClusterError, match=r"cannot write the run directory .*DTRAIN_HOME"):
        manager.submit_job(spec)


def test_an_unknown_job(cluster):
    for ask in (cluster.manager.job_status, cluster.manager.job_logs, cluster.manager.cancel_job):
        with pytest.raises(ClusterError, match="no job 'nobody' on cluster 'local'"):
            ask("nobody")
    assert cluster.manager.list_jobs() == []

"""What the local cluster refuses: each message names the setting and the remedy; nothing starts, nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain_dagster.clusters.base import ClusterError, JobSpec
from dtrain_dagster.clusters.managers import LocalClusterManager


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

"""The test cluster itself: what the tests of the SLURM engine rely on holds, and nothing of it is left behind."""

from __future__ import annotations

import socket

import psutil
import pytest

from harness.engines.slurm_cluster import SlurmCluster, missing

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_it_listens_on_loopback_only(slurm: SlurmCluster) -> None:
    listening = [
        connection.laddr.ip
        for pid in slurm.processes()
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and connection.family == socket.AF_INET
    ]
    assert len(listening) == len(slurm.nodes) + 1
    assert set(listening) == {"127.0.0.1"}


def test_nothing_is_left_of_a_cluster() -> None:
    if why := missing():
        pytest.skip(why)
    with SlurmCluster(nodes=1) as cluster:
        cluster.ask("sbatch", f"--output={cluster.folder}/%j.out", "--wrap=setsid sleep 1000 & sleep 1000")
        cluster.wait(lambda: len(cluster.processes("n1")) > 3, "the job's processes")
        folder, pids = cluster.folder, cluster.processes()
    assert not cluster.processes()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    assert not folder.exists()

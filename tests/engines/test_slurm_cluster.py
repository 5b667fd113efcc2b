"""The test cluster itself: what the tests of the SLURM engine rely on holds, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import socket

import psutil
import pytest

from harness.engines.slurm_cluster import SlurmCluster, missing

pytestmark = [pytest.mark.slow, pytest.mark.long]


def submit(cluster: SlurmCluster, script: str, *options: str) -> str:
    """The id of a job that runs this line of shell; its output goes to ``<id>.out`` in the cluster's folder."""
    output = f"--output={cluster.folder}/%j.out"
    return cluster.ask("sbatch", "--parsable", "--no-requeue", output, *options, f"--wrap={script}").strip()


def state(cluster: SlurmCluster, job: str) -> str:
    return cluster.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()


def test_jobs_run_on_the_machine_that_was_asked_for(slurm: SlurmCluster) -> None:
    jobs = {node: submit(slurm, "echo $SLURMD_NODENAME", "-w", node) for node in slurm.nodes}
    for node, job in jobs.items():
        slurm.wait(lambda job=job: state(slurm, job) == "COMPLETED", "a job")
        assert (slurm.folder / f"{job}.out").read_text() == f"{node}\n"


def test_it_listens_on_loopback_only(slurm: SlurmCluster) -> None:
    listening = [
        connection.laddr.ip
        for pid in slurm.processes()
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and connection.family == socket.AF_INET
    ]
    assert len(listening) == len(slurm.nodes) + 1
    assert set(listening) == {"127.0.0.1"}


def test_a_machine_that_is_killed_takes_its_jobs_along_and_comes_back(slurm: SlurmCluster) -> None:
    job = submit(slurm, "echo $$; exec sleep 1000", "-w", "n2")
    output = slurm.folder / f"{job}.out"
    slurm.wait(lambda: output.exists() and output.read_text(), "the job's process")
    process = psutil.Process(int(output.read_text()))
    slurm.kill("n2")
    with contextlib.suppress(psutil.NoSuchProcess):
        assert process.status() == psutil.STATUS_ZOMBIE, "only what its new parent has not looked after yet is left"
    slurm.wait(lambda: state(slurm, job) == "NODE_FAIL", "the loss")
    slurm.start("n2")
    slurm.wait_for_nodes()


def test_the_control_program_comes_back_with_all_that_it_knew(slurm: SlurmCluster) -> None:
    job = submit(slurm, "sleep 1000")
    slurm.wait(lambda: state(slurm, job) == "RUNNING", "the job")
    slurm.restart("slurmctld")
    assert state(slurm, job) == "RUNNING"
    slurm.ask("scancel", job)


def test_accounting_has_the_times_of_ended_jobs() -> None:
    if why := missing(accounting=True):
        pytest.skip(why)
    with SlurmCluster(nodes=1, accounting=True) as cluster:
        job = submit(cluster, "exit 3")
        asked = ("sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode,ElapsedRaw")
        cluster.wait(lambda: cluster.ask(*asked).startswith("FAILED|3:0|"), "the record")


def test_nothing_is_left_of_a_cluster() -> None:
    if why := missing():
        pytest.skip(why)
    with SlurmCluster(nodes=1) as cluster:
        submit(cluster, "setsid sleep 1000 & sleep 1000")
        cluster.wait(lambda: len(cluster.processes("n1")) > 3, "the job's processes")
        folder, pids = cluster.folder, cluster.processes()
    assert not cluster.processes()
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    assert not folder.exists()

"""A whole training in pods: its weights are those of the local cluster, whatever happens to its nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dtrain_dagster.clusters.base import JobSpec, JobState
from dtrain_dagster.clusters.local.manager import LocalClusterManager
from tests.engines.kubernetes_access import NAMESPACE, deploy
from tests.engines.kubernetes_cluster import KubernetesCluster
from tests.engines.kubernetes_training import NODES, Training, write_job
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long]
STEPS = 2500
TOLERANCE = 5e-3
"""Sums over another number of ranks are rounded differently, and many steps make that larger. That no sample was lost,
or used twice, is compared exactly."""


class Outcome(NamedTuple):
    status: str
    steps: int
    consumed: list[dict[str, Any]]
    """Of each epoch: the number of its samples, and a digest of which."""
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def access(kubernetes: KubernetesCluster) -> Path:
    return deploy(kubernetes)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same training on the local cluster, with as many nodes."""
    home = tmp_path_factory.mktemp("here")
    rundir, manager = write_job(home, STEPS), LocalClusterManager(home)
    command = (sys.executable, "-P", "-m", "trainer", "--config", f"{rundir.uri}/job.json")
    manager.submit_job(JobSpec(job_id="one", run_dir=rundir.uri, command=command, node_count=NODES, elastic=True))
    while not (status := manager.job_status("one")).state.is_final:
        manager.wait(status)
    assert status.state == JobState.SUCCEEDED, status
    return outcome(rundir)


@pytest.fixture
def training(kubernetes: KubernetesCluster, access: Path, tmp_path: Path) -> Iterator[Training]:
    made = Training(access, tmp_path, STEPS)
    yield made
    made.engine.forget(made.launch)
    kubernetes.wait(lambda: not kubernetes.processes(str(tmp_path)), "the end of all nodes")


def outcome(rundir: RunDir) -> Outcome:
    result = rundir.read_result()
    assert result is not None
    assert result["weights_equal_on_ranks"]
    weights = torch.load(f"{rundir.uri}/model/weights.pt", weights_only=True)
    return Outcome(result["status"], result["steps"], result["consumed"], weights)


def assert_same(training: Training, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    training.run_until(training.is_over)
    made = outcome(training.rundir)
    assert (made.status, made.steps, made.consumed) == ("succeeded", STEPS, expected.consumed)
    steps = [event["step"] for event in training.rundir.events("step")]
    assert len(steps) == len(set(steps)), "no step that counts was done twice"
    torch.testing.assert_close(made.weights, expected.weights, rtol=tolerance, atol=tolerance)


def test_pods_train_what_the_local_cluster_trains(training: Training, expected: Outcome) -> None:
    training.start()
    assert_same(training, expected, tolerance=0.0)
    assert {job.incarnation for job in training.jobs.values()} == {1}


def test_a_pod_is_deleted(kubernetes: KubernetesCluster, training: Training, expected: Outcome) -> None:
    training.start()
    training.run_until(lambda: training.step() > 20)
    name = training.jobs[1].id
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    (pod,) = kubernetes.ask("GET", f"{pods}?labelSelector=job-name={name}")["items"]
    kubernetes.ask("DELETE", f"{pods}/{pod['metadata']['name']}?gracePeriodSeconds=0")
    assert_same(training, expected)
    assert training.jobs[1].incarnation == 2


def test_a_machine_is_lost(kubernetes: KubernetesCluster, training: Training, expected: Outcome) -> None:
    training.start()
    training.run_until(lambda: training.step() > 20)
    host = training.jobs[0].host
    kubernetes.kill(host)
    try:
        assert_same(training, expected)
        assert training.jobs[0].incarnation == 2
        assert training.jobs[0].host != host
    finally:
        kubernetes.start(host)
        kubernetes.wait_for_node(host)


def test_the_api_server_is_killed(kubernetes: KubernetesCluster, training: Training, expected: Outcome) -> None:
    training.start()
    training.run_until(lambda: training.step() > 20)
    kubernetes.kill("kube-apiserver")
    before = training.step()
    training.run_until(lambda: training.step() > before + 100)
    kubernetes.start("kube-apiserver")
    assert_same(training, expected)
    assert {job.incarnation for job in training.jobs.values()} == {1}

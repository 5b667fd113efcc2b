"""Whole trainings in pods: their weights are those of the local cluster, whatever happens to machines, pods or the API
server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions
from dtrain_dagster.clusters.supervision.engine import EngineJob
from tests.engines.engine_training import EngineTrials, Outcome, Training, assert_same, incarnations
from tests.engines.kubernetes_access import NAMESPACE, deploy
from tests.engines.kubernetes_cluster import KubernetesCluster
from tests.engines.kubernetes_image import IMAGE, host_volumes

pytestmark = [pytest.mark.slow, pytest.mark.long]


class Pods:
    """The test cluster's machines."""

    kind = "kubernetes"

    def __init__(self, cluster: KubernetesCluster, kubeconfig: Path) -> None:
        self.cluster, self.kubeconfig = cluster, kubeconfig

    def options(self, folder: Path) -> dict[str, Any]:
        volumes = [
            {"mount": path, "source": {"hostPath": {"path": path}}, "read_only": read_only}
            for path, read_only in host_volumes(folder)
        ]
        return {
            "kubeconfig": str(self.kubeconfig), "namespace": NAMESPACE, "image": IMAGE, "pull_policy": "Never",
            "cpu": "100m", "memory": "1Gi", "shared_memory": "1Mi", "lost_seconds": 1, "poll_seconds": 0.3,
            "volumes": volumes, "user": 0, "python": sys.executable,
        }  # fmt: skip

    def too_large(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        return options | {"cpu": "500"}, "cpu"

    def jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        options = KubernetesOptions.read({"kubeconfig": str(self.kubeconfig), "namespace": NAMESPACE, "image": IMAGE})
        return KubernetesEngine(options, "", lambda *_: ()).list_jobs(launch)

    def kill_node(self, job: EngineJob) -> Callable[[], None]:
        self.cluster.kill(job.host)

        def give_back() -> None:
            self.cluster.start(job.host)
            self.cluster.wait_for_node(job.host)

        return give_back

    def kill_control_plane(self) -> Callable[[], None]:
        self.cluster.kill("kube-apiserver")
        return lambda: self.cluster.start("kube-apiserver")


class TestKubernetes(EngineTrials):
    @pytest.fixture(scope="class")
    @classmethod
    def machines(cls, kubernetes: KubernetesCluster) -> Pods:
        return Pods(kubernetes, deploy(kubernetes))

    def test_a_pod_is_deleted(self, machines: Pods, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        name = next(job.id for job in machines.jobs(training.launch()) if job.node_id == 1)
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        (pod,) = machines.cluster.ask("GET", f"{pods}?labelSelector=job-name={name}")["items"]
        machines.cluster.ask("DELETE", f"{pods}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a replacement")
        assert_same(training, expected)

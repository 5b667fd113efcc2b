"""Whole trainings in pods: their weights are those of the local cluster, whatever happens to machines, pods or the API
server."""

from __future__ import annotations

import pytest

from harness.engines.engine_training import Outcome, Training
from harness.engines.kubernetes_access import NAMESPACE
from harness.engines.machines import Pods
from tests.engines.engine_trials import EngineTrials, assert_same, incarnations

pytestmark = [pytest.mark.slow, pytest.mark.long]


class TestKubernetes(EngineTrials):
    kind = "kubernetes"

    def as_a_person(self, machines: Pods, words: list[str]) -> list[str]:
        """With the rights of an administrator: dtrain's own service account may not enter a pod."""
        own, admin = f"--kubeconfig={machines.kubeconfig}", f"--kubeconfig={machines.cluster.kubeconfig}"
        assert own in words
        return [admin if word == own else word for word in words]

    def test_a_pod_is_deleted(self, machines: Pods, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        name = next(job.id for job in machines.jobs(training.launch()) if job.node_id == 1)
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        (pod,) = machines.cluster.ask("GET", f"{pods}?labelSelector=job-name={name}")["items"]
        machines.cluster.ask("DELETE", f"{pods}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a replacement")
        assert_same(training, expected)

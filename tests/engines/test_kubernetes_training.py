"""Whole trainings in pods: their weights are those of the local cluster, whatever happens to machines, pods or the API
server."""

from __future__ import annotations

import pytest

from tests.engines.engine_training import EngineTrials, Outcome, Training, assert_same, incarnations
from tests.engines.kubernetes_access import NAMESPACE
from tests.engines.machines import Pods

pytestmark = [pytest.mark.slow, pytest.mark.long]


class TestKubernetes(EngineTrials):
    kind = "kubernetes"

    def test_a_pod_is_deleted(self, machines: Pods, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        name = next(job.id for job in machines.jobs(training.launch()) if job.node_id == 1)
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        (pod,) = machines.cluster.ask("GET", f"{pods}?labelSelector=job-name={name}")["items"]
        machines.cluster.ask("DELETE", f"{pods}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a replacement")
        assert_same(training, expected)

"""The engine on a real control plane where somebody drains a machine: an evicted pod is a lost node, and no failure."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.supervision.engine import name_launch
from harness.engines.kubernetes_access import NAMESPACE, deploy, make_engine, make_options
from harness.engines.kubernetes_cluster import KubernetesCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@pytest.fixture(scope="module")
def access(kubernetes: KubernetesCluster) -> Path:
    return deploy(kubernetes)


@pytest.mark.parametrize("script", ["trap 'exit 143' TERM; sleep 100 & wait", "sleep 100"], ids=["in order", "killed"])
def test_an_evicted_pod_is_lost_and_another_takes_its_place(
    kubernetes: KubernetesCluster, access: Path, script: str
) -> None:
    launch: dict[str, Any] = {"job_id": "job", "token": secrets.token_hex(24), "launch": 1, "env": {}}
    engine = make_engine(make_options(access), script)
    engine.submit(launch, 0, 1)
    kubernetes.wait(lambda: [job.state for job in engine.list_jobs(launch)] == ["running"], "the node")
    (pod,) = kubernetes.ask("GET", f"{PODS}?labelSelector=dtrain/launch={name_launch(launch)}")["items"]
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    kubernetes.ask("POST", f"{PODS}/{name}/eviction", eviction | {"deleteOptions": {"gracePeriodSeconds": 2}})
    kubernetes.wait(lambda: [job.state for job in engine.list_jobs(launch)] == ["ended"], "its end")
    (lost,) = engine.list_jobs(launch)
    assert lost.lost, lost
    second = engine.submit(launch, 0, 2)
    kubernetes.wait(
        lambda: any(job.id == second and job.state == "running" for job in engine.list_jobs(launch)), "another node"
    )
    engine.cancel([second], force=True)
    kubernetes.wait(lambda: all(job.state == "ended" for job in engine.list_jobs(launch)), "the end of all")

"""The engine against a real control plane and real kubelets, as the service account of `deploy/kubernetes`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.supervision.engine import EngineJob, name_job
from harness.engines.kubernetes_access import NAMESPACE, deploy, make_engine, make_options, pod_template
from harness.engines.kubernetes_cluster import KubernetesCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
_tokens = itertools.count(1)


@pytest.fixture(scope="module")
def access(kubernetes: KubernetesCluster) -> Path:
    return deploy(kubernetes)


@pytest.fixture
def launch() -> dict[str, Any]:
    return {"job_id": "job", "token": f"{next(_tokens):048x}", "launch": 1, "env": {}}


def watch(
    cluster: KubernetesCluster, engine: KubernetesEngine, launch: dict[str, Any], holds: Callable[[EngineJob], bool]
) -> EngineJob:
    """The only job of a launch, as soon as this holds of it."""
    seen: list[EngineJob] = []

    def look() -> bool:
        seen[:] = engine.list_jobs(launch)
        return len(seen) == 1 and holds(seen[0])

    cluster.wait(look, f"a state of the node; it was {seen}")
    return seen[0]


def test_a_node_runs_once_and_its_end_its_times_and_its_output_are_told(
    kubernetes: KubernetesCluster, access: Path, launch: dict[str, Any]
) -> None:
    engine = make_engine(make_options(access), "echo said; exit 7")
    name = engine.submit(launch, 3, 2)
    ended = watch(kubernetes, engine, launch, lambda job: job.state == "ended")
    assert (ended.id, ended.node_id, ended.incarnation, ended.exit_code, ended.lost) == (name, 3, 2, 7, False)
    assert ended.host in kubernetes.nodes
    assert ended.submitted_at is not None and ended.started_at is not None and ended.ended_at is not None  # noqa: PT018
    assert ended.submitted_at <= ended.started_at <= ended.ended_at
    assert engine.read_log(name) == "said\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cpus": 1000.0}, "lower DTRAIN_NODE_CPUS"),
        ({"gpus": 1}, "nvidia.com/gpu"),
        ({"pod_template": pod_template({"nodeSelector": {"gpu": "a100"}})}, "check nodeSelector, tolerations"),
        ({"image": "localhost/absent:1"}, "imagePullPolicy in the pod_template of DTRAIN_KUBERNETES_OPTIONS is Never"),
        ({"image": "127.0.0.1:1/absent:1", "pod_template": pod_template()}, "check DTRAIN_KUBERNETES_IMAGE"),
        ({"pod_template": pod_template({"serviceAccountName": "nobody"})}, "change serviceAccountName in"),
        ({"pod_template": pod_template({"priorityClassName": "absent"})}, "change priorityClassName in"),
        (
            {"pod_template": pod_template(imagePullPolicy="Never", envFrom=[{"secretRef": {"name": "absent"}}])},
            "Secrets in the pod_template of DTRAIN_KUBERNETES_OPTIONS",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_node_that_waits_says_why_and_what_helps(
    kubernetes: KubernetesCluster, access: Path, launch: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    engine = make_engine(make_options(access, **changes))
    name = engine.submit(launch, 0, 1)
    waits = watch(kubernetes, engine, launch, lambda job: said in job.reason)
    assert waits.state == "pending"
    engine.cancel([name], force=True)
    kubernetes.wait(lambda: not engine.list_jobs(launch), "the end of a node that waited")


def test_a_node_is_told_to_end_and_may_clean_up(
    kubernetes: KubernetesCluster, access: Path, launch: dict[str, Any]
) -> None:
    engine = make_engine(
        make_options(access), "trap 'echo cleaned; exit 3' TERM; echo runs; while :; do sleep 0.1; done"
    )
    name = engine.submit(launch, 0, 1)
    kubernetes.wait(lambda: engine.read_log(name) == "runs\n", "the program")
    engine.cancel([name], force=False)
    codes = set()

    def is_gone() -> bool:
        left = engine.list_jobs(launch)
        codes.update(job.exit_code for job in left if job.state == "ended")
        return not left

    kubernetes.wait(is_gone, "the end")
    assert codes <= {3, None}, "for a moment the Job may be there without its pod"


def test_a_pod_that_is_deleted_is_a_lost_node_and_runs_nowhere_again(
    kubernetes: KubernetesCluster, access: Path, launch: dict[str, Any]
) -> None:
    engine = make_engine(make_options(access), f"'a deleted one {launch['token']}'; sleep 1000")
    name = engine.submit(launch, 0, 1)
    watch(kubernetes, engine, launch, lambda job: job.state == "running")
    pod = kubernetes.ask("GET", f"{PODS}?labelSelector=job-name={name}")["items"][0]["metadata"]["name"]
    kubernetes.ask("DELETE", f"{PODS}/{pod}?gracePeriodSeconds=0")
    lost = watch(kubernetes, engine, launch, lambda job: job.state == "ended")
    assert lost.lost
    kubernetes.wait(lambda: not engine.list_jobs(launch), "the end of the Job")
    kubernetes.wait(lambda: not kubernetes.processes(launch["token"]), "the end of the process")


def test_what_cannot_work_is_refused_before_anything_is_made(
    kubernetes: KubernetesCluster, access: Path, launch: dict[str, Any]
) -> None:
    options = make_options(access)
    make_engine(options).check()
    with pytest.raises(ClusterError, match="deploy/kubernetes has the rights"):
        make_engine(options.model_copy(update={"namespace": "default"})).check()
    with pytest.raises(ClusterError, match="context in DTRAIN_KUBERNETES_OPTIONS"):
        make_engine(options.model_copy(update={"context": "absent"})).check()
    with pytest.raises(ClusterError, match="KUBECONFIG"):
        make_engine(options.model_copy(update={"kubeconfig": "/absent/kubeconfig"})).check()
    with pytest.raises(ClusterError, match="create it, or set namespace in DTRAIN_KUBERNETES_OPTIONS"):
        make_engine(
            options.model_copy(update={"kubeconfig": str(kubernetes.kubeconfig), "namespace": "absent"})
        ).submit(launch, 0, 1)
    stranger = kubernetes.folder / "stranger.yaml"
    stranger.write_text(kubernetes.write_kubeconfig("not-a-token", kubernetes.url))
    with pytest.raises(ClusterError, match="log in again"):
        make_engine(options.model_copy(update={"kubeconfig": str(stranger)})).check()
    assert not [
        job for job in kubernetes.ask("GET", JOBS)["items"] if job["metadata"]["name"] == name_job(launch, 0, 1)
    ]


def test_a_node_keeps_the_rights_of_its_pod(
    kubernetes: KubernetesCluster, access: Path, launch: dict[str, Any]
) -> None:
    looks = "echo $(id -u) $HOME; touch /file 2>/dev/null && echo writes; ls /var/run/secrets 2>/dev/null && echo token"
    engine = make_engine(make_options(access, service_account="dtrain-node"), looks.replace("id -u", "busybox id -u"))
    name = engine.submit(launch, 0, 1)
    watch(kubernetes, engine, launch, lambda job: job.state == "ended")
    assert engine.read_log(name) == "1000 /tmp\n"

from __future__ import annotations

from typing import Any

import pytest
from kubeflow_trainer_api import models

from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions
from dtrain_dagster.clusters.kubernetes.train_job import object_name, train_job
from dtrain_dagster.settings.kubernetes import read_volumes

OPTIONS = KubernetesOptions.read({
    "image": "registry.example/dtrain:1", "gpus": 8, "queue": "research",
    "volumes": read_volumes("pvc:shared:/data"),
    "pod_template": {"spec": {"containers": [{"name": "node", "envFrom": [{"secretRef": {"name": "storage"}}]}]}},
})  # fmt: skip
KINDS = {"TrainingRuntime": models.TrainerV1alpha1TrainingRuntime, "TrainJob": models.TrainerV1alpha1TrainJob}


def made() -> list[dict[str, Any]]:
    return train_job(OPTIONS, "Prices_of.stocks", "/data/jobs/one/job.json", 4, 8)


def as_known(document: dict[str, Any]) -> dict[str, Any]:
    """What Kubeflow's own models keep of a document: they drop fields that they do not know."""
    known = KINDS[document["kind"]].from_dict(document)
    assert known is not None
    return dict(known.to_dict())


def test_kubeflow_knows_every_field():
    for document in made():
        assert as_known(document) == document


def test_a_field_that_does_not_exist_would_be_noticed():
    job = made()[1]
    job["spec"]["trainer"]["numnodes"] = 4
    assert as_known(job) != job


def test_the_job_names_its_runtime_its_size_and_its_configuration():
    runtime, job = made()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"] == {"numNodes": 4, "numProcPerNode": 8}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"  # the name that Kubeflow gives nodes of its torch runtimes
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][-2:] == ["--config", "/data/jobs/one/job.json"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"name": "storage-0", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]


@pytest.mark.parametrize(
    ("job_id", "name"), [("a", "dtrain-a"), ("A_b..c", "dtrain-a-b-c"), ("x" * 90, "dtrain-" + "x" * 33)]
)
def test_names_are_those_of_objects(job_id: str, name: str):
    assert object_name(job_id) == name

"""A training as a TrainJob of Kubeflow Trainer, for clusters where another system starts jobs. Pure.

Kubeflow then owns the training: it starts all nodes together through torchrun, and starts the whole job again where one
is lost. What this project does for lost nodes, and its bill, needs ``DTRAIN_CLUSTER=kubernetes`` (`engine`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dtrain_dagster.clusters.kubernetes.manifest import CONTAINER, QUEUE, label_of, pod_spec
from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions

API = "trainer.kubeflow.org/v1alpha1"
GRACE_SECONDS = 30.0
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"


def train_job(
    options: KubernetesOptions, job_id: str, config: str, node_count: int, ranks_per_node: int
) -> list[dict[str, Any]]:
    """Return the TrainingRuntime and the TrainJob of a training. ``config``: the address of its ``job.json`` on a
    storage that all pods reach."""
    name = object_name(job_id)
    command = [options.python, "-m", "torch.distributed.run", "-m", "trainer", "--config", config]
    labels = {"app.kubernetes.io/name": "dtrain", "dtrain/job": label_of(job_id)}
    about = {"name": name, "namespace": options.namespace, "labels": labels}
    return [
        {"apiVersion": API, "kind": "TrainingRuntime", "metadata": about, "spec": _runtime(options, command, labels)},
        {
            "apiVersion": API,
            "kind": "TrainJob",
            "metadata": {**about, "labels": {**labels, **({QUEUE: options.queue} if options.queue else {})}},
            "spec": {
                "runtimeRef": {"apiGroup": API.split("/")[0], "kind": "TrainingRuntime", "name": name},
                "trainer": {"numNodes": node_count, "numProcPerNode": ranks_per_node},
            },
        },
    ]


def object_name(job_id: str) -> str:
    """Return the name of a job's objects: at most 40 lower-case letters, digits and hyphens, since Kubeflow adds
    to it."""
    return re.sub(r"[^a-z0-9]+", "-", f"dtrain-{job_id}".lower())[:40].strip("-")


def _runtime(options: KubernetesOptions, command: Sequence[str], labels: dict[str, str]) -> dict[str, Any]:
    pod = pod_spec(options, command, GRACE_SECONDS, labels)
    # torchrun makes an address of its own, and the containers of a runtime have Kubeflow's names.
    container = {**pod["containers"][0], "name": CONTAINER}
    container["env"] = [variable for variable in container["env"] if variable["name"] != "DTRAIN_HOST"]
    job = {
        "metadata": {"labels": {_STEP: "trainer"}},
        "spec": {
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": {**pod, "containers": [container]}},
        },
    }
    return {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": job}]}},
    }

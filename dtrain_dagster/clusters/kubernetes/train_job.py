"""A training as a TrainJob of Kubeflow Trainer, for clusters where another system starts jobs. Pure.

Kubeflow then owns the training: it starts all nodes together through torchrun, and starts the whole job again where one
is lost. What this project does for lost nodes, and its bill, needs ``DTRAIN_CLUSTER=kubernetes`` (`engine`).

    python -m dtrain_dagster.clusters.kubernetes.train_job JOB.JSON --nodes 4 | kubectl apply -f -
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import ClusterError
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a training as a TrainJob with its runtime."""
    import yaml

    from dtrain_dagster.settings.environment import load_settings
    from dtrain_dagster.settings.kubernetes import read_kubernetes_options
    from trainer.config import parse_job

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("config", metavar="JOB.JSON", help="as for python -m trainer, at the same path in the pods")
    parser.add_argument("--nodes", type=int, metavar="N", help="default: DTRAIN_NODES")
    parser.add_argument("--ranks", type=int, metavar="R", help="ranks per node; default: one per GPU")
    asked = parser.parse_args(arguments)
    if min(asked.nodes or 1, asked.ranks or 1) < 1:
        parser.error("--nodes and --ranks are at least 1")
    try:
        options = KubernetesOptions.read(read_kubernetes_options())
        job = parse_job(Path(asked.config).read_text(), source=asked.config)
        nodes, ranks = asked.nodes or load_settings().nodes, asked.ranks or max(1, options.gpus)
    except (ValueError, OSError, ClusterError) as error:
        parser.error(str(error))
    made = train_job(options, job.job_id, asked.config, nodes, ranks)
    yaml.safe_dump_all(made, sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()

"""The objects that a training is made of in Kubernetes, as JSON: one Job per incarnation of a node, and one ConfigMap
that owns them, so that its deletion deletes all. Pure: nothing is asked of a cluster here.

A node that is lost gets a new Job with a new name, so a Job never starts its pod again by itself (``backoffLimit: 0``).
What the answers of a cluster mean belongs in `answers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters.supervision.engine import name_job, name_launch
from dtrain_dagster.settings.kubernetes import CONTAINER, KubernetesSettings

JOB, LAUNCH, NODE, INCARNATION = "dtrain/job", "dtrain/launch", "dtrain/node", "dtrain/incarnation"
"""Labels of everything that belongs to a node: the job's id as far as a label can hold it, the name of its launch, and
the numbers of node and incarnation."""
SCRATCH, SHARED_MEMORY = "/tmp", "/dev/shm"
"""The only folders of a pod's own that can be written to; they go with the pod."""
QUEUE = "kueue.x-k8s.io/queue-name"
USER = 1000
"""The user and group that nodes run as, unless the pod template says otherwise."""
KEEP_SECONDS = 3600
"""Seconds for which the cluster keeps the record and output of an ended node."""
LOST_SECONDS = 20
"""Seconds after which a machine that does not answer is given up for lost, unless the pod template says otherwise."""
LOST_MACHINE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""The taints of a machine that does not answer."""


def label_of(text: str) -> str:
    """Return a text as the value of a label: 63 characters of those that are allowed, others replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:63].strip("_.-")


def group_object(options: KubernetesSettings, launch: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
    """Return the ConfigMap that owns all Jobs of a launch."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name_launch(launch),
            "namespace": options.namespace,
            "labels": _labels(launch),
        },
        "data": {"job_id": launch["job_id"], "launch": str(launch["launch"]), "run_directory": run_dir},
    }


def node_object(
    options: KubernetesSettings,
    launch: Mapping[str, Any],
    node_id: int,
    incarnation: int,
    command: Sequence[str],
    owner_uid: str,
    grace_seconds: float,
) -> dict[str, Any]:
    """Return the Job of one incarnation of a node, which runs ``command``. ``owner_uid``: of the ConfigMap of
    `group_object`. ``grace_seconds``: from SIGTERM to SIGKILL."""
    labels = {**_labels(launch), NODE: str(node_id), INCARNATION: str(incarnation)}
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": name_launch(launch), "uid": owner_uid}
    annotations = {
        # A step of all nodes waits for each of them: nobody should be moved for tidiness.
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name_job(launch, node_id, incarnation),
            "namespace": options.namespace,
            "labels": {**labels, **({QUEUE: options.queue} if options.queue else {})},
            "ownerReferences": [owner],
        },
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            **({"suspend": True} if options.queue else {}),  # Kueue takes the brake off
            "template": {
                "metadata": merge(
                    options.pod_template.get("metadata", {}), {"labels": labels, "annotations": annotations}
                ),
                "spec": pod_spec(options, command, grace_seconds, {LAUNCH: name_launch(launch)}),
            },
        },
    }


def _labels(launch: Mapping[str, Any]) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "dtrain",
        "app.kubernetes.io/component": "training",
        JOB: label_of(launch["job_id"]),
        LAUNCH: name_launch(launch),
    }


def pod_spec(
    options: KubernetesSettings, command: Sequence[str], grace_seconds: float, apart: Mapping[str, str]
) -> dict[str, Any]:
    """Return the specification of a node's pod: ours, with what the pod template has in its place or beside it.
    ``apart``: the label of the pods that it is kept apart from, unless the template has an affinity."""
    template = options.pod_template.get("spec", {})
    storage = [{"name": f"storage-{index}", **volume["source"]} for index, volume in enumerate(options.volumes)]
    mounts: list[dict[str, Any]] = [
        {"name": f"storage-{index}", "mountPath": volume["mount"], "readOnly": volume["read_only"]}
        for index, volume in enumerate(options.volumes)
    ]
    given = {mount["mountPath"].rstrip("/") for mount in mounts}
    given |= {
        mount["mountPath"].rstrip("/")
        for container in template.get("containers", [])
        for mount in container.get("volumeMounts", [])
    }
    own = {SCRATCH: ("scratch", {}), SHARED_MEMORY: ("shared-memory", {"medium": "Memory"})}
    for path, (name, source) in own.items():
        if path not in given:  # a user's volume takes the place of ours
            storage.append({"name": name, "emptyDir": source})
            mounts.append({"name": name, "mountPath": path})
    tolerated = {toleration.get("key") for toleration in template.get("tolerations", [])}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, round(grace_seconds)),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_SECONDS}
            for key in LOST_MACHINE
            if key not in tolerated
        ],
        "containers": [_container(options, command, mounts)],
        "volumes": storage,
    }
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if "affinity" not in template:
        term = {"labelSelector": {"matchLabels": dict(apart)}, "topologyKey": "kubernetes.io/hostname"}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        spec["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return merge(spec, template)


def merge(below: Any, above: Any) -> Any:
    """Return ``below`` with what ``above`` has in its place: mappings are merged, and so are objects of lists that have
    the same name; other objects of lists are added. Pure."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **above, **{name: merge(below[name], above[name]) for name in below.keys() & above.keys()}}
    if isinstance(below, list) and isinstance(above, list):
        named = {item["name"]: item for item in above if _is_named(item)}
        merged = [merge(item, named.pop(item["name"], {})) if _is_named(item) else item for item in below]
        return [*merged, *named.values(), *(item for item in above if not _is_named(item))]
    return above


def _is_named(item: Any) -> bool:
    """Return whether an object of a list is known by its name; a volume may be mounted at several places."""
    return isinstance(item, Mapping) and "name" in item and "mountPath" not in item


def _container(options: KubernetesSettings, command: Sequence[str], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    limits = {"memory": options.memory, **({options.gpu_resource: str(options.gpus)} if options.gpus else {})}
    return {
        "name": CONTAINER,
        "image": options.image,
        "command": list(command),
        "env": [
            # The address that other nodes reach this one at; a host's name need not resolve in a pod.
            {"name": "DTRAIN_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": SCRATCH},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ],
        "resources": {"requests": {"cpu": options.cpu, **limits}, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
        # The last lines of the output stay with the pod's record where the program leaves no message of its own.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }

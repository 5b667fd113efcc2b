"""The objects that a training is made of in Kubernetes, as JSON: one Job per incarnation of a node, and one ConfigMap
that owns them, so that its deletion deletes all. Pure: nothing is asked of a cluster here.

A node that is lost gets a new Job with a new name, so a Job never starts its pod again by itself (``backoffLimit: 0``).
What the answers of a cluster mean belongs in `answers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain_dagster.clusters.kubernetes.options import KubernetesOptions
from dtrain_dagster.clusters.supervision.engine import name_job, name_launch

JOB, LAUNCH, NODE, INCARNATION = "dtrain/job", "dtrain/launch", "dtrain/node", "dtrain/incarnation"
"""Labels of everything that belongs to a node: the job's id as far as a label can hold it, the name of its launch, and
the numbers of node and incarnation."""
CONTAINER = "node"
SCRATCH, SHARED_MEMORY = "/tmp", "/dev/shm"
"""The only folders of a pod's own that can be written to; they go with the pod."""
QUEUE = "kueue.x-k8s.io/queue-name"
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def label_of(text: str) -> str:
    """Return a text as the value of a label: 63 characters of those that are allowed, others replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:63].strip("_.-")


def group_object(options: KubernetesOptions, launch: Mapping[str, Any], run_dir: str) -> dict[str, Any]:
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
    options: KubernetesOptions,
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
            "ttlSecondsAfterFinished": options.keep_seconds,
            **({"suspend": True} if options.queue else {}),  # Kueue takes the brake off
            "template": {
                "metadata": {"labels": labels, "annotations": annotations},
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
    options: KubernetesOptions, command: Sequence[str], grace_seconds: float, apart: Mapping[str, str]
) -> dict[str, Any]:
    """Return the specification of a node's pod. ``apart``: the label of the pods that it is kept apart from."""
    own: dict[str, dict[str, Any]] = {
        SCRATCH: {"name": "scratch", "emptyDir": {}},
        SHARED_MEMORY: {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
    }
    given = {volume.mount.rstrip("/") for volume in options.volumes}  # a user's volume takes the place of ours
    volumes = [volume for mount, volume in own.items() if mount not in given]
    mounts: list[dict[str, Any]] = [
        {"name": volume["name"], "mountPath": mount} for mount, volume in own.items() if mount not in given
    ]
    for index, volume in enumerate(options.volumes):
        volumes.append({"name": f"storage-{index}", **volume.source})
        mounts.append({"name": f"storage-{index}", "mountPath": volume.mount, "readOnly": volume.read_only})
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, round(grace_seconds)),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": options.user != 0,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [*map(dict, options.tolerations), *_lost_tolerations(options)],
        "containers": [_container(options, command, mounts)],
        "volumes": volumes,
    }
    if options.spread != "none":
        spec["affinity"] = {"podAntiAffinity": _apart(options.spread, apart)}
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secrets]
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    return spec


def _container(options: KubernetesOptions, command: Sequence[str], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    limits = {"memory": options.memory, **({options.gpu_resource: str(options.gpus)} if options.gpus else {})}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
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
    if options.env_secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in options.env_secrets]
    return container


def _lost_tolerations(options: KubernetesOptions) -> list[dict[str, Any]]:
    named = {toleration["key"] for toleration in options.tolerations}
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": options.lost_seconds}
        for key in _LOST
        if key not in named
    ]


def _apart(spread: str, label: Mapping[str, str]) -> dict[str, Any]:
    term = {"labelSelector": {"matchLabels": dict(label)}, "topologyKey": "kubernetes.io/hostname"}
    if spread == "require":
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}

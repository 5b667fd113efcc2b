"""The objects that a training is made of in Kubernetes, as JSON, and what a cluster's answers about them mean. Pure:
what is asked, and what is done about it, belongs in `engine`.

There is one Job per incarnation of a node; all have the label of their launch. A node that is lost gets a new Job with
a new name, so a Job never starts its pod again by itself (``backoffLimit: 0``). A Job, its pods and their events give
the state of a node, with the reason and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from dtrain_dagster.clusters.supervision.engine import EngineJob, name_job, name_launch
from dtrain_dagster.settings.kubernetes import CONTAINER, KubernetesSettings
from dtrain_dagster.settings.nodes import NODE as N

Answer = Mapping[str, Any]
S = "DTRAIN_KUBERNETES_"
TEMPLATE = f"the pod_template of {S}OPTIONS"
TAKEN_AWAY = {
    "Evicted", "Preempting", "Preempted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity",
    "UnexpectedAdmissionError", "OutOfcpu", "OutOfmemory", "OutOfpods",
}  # fmt: skip
"""Reasons of a failed pod that say something of its machine, and nothing of the program."""
_WAITS = {
    "ImagePullBackOff": f"check {S}IMAGE, imagePullSecrets in {TEMPLATE}, and that the machines reach the registry",
    "ErrImageNeverPull": f"the machine does not have the image, and imagePullPolicy in {TEMPLATE} is Never",
    "InvalidImageName": f"correct {S}IMAGE",
    "CreateContainerConfigError": f"check that the Secrets in {TEMPLATE} exist, and that its user may run the image",
    "CreateContainerError": f"check {S}VOLUMES and {N}PYTHON",
}
_WAITS["ErrImagePull"] = _WAITS["ImagePullBackOff"]
_REFUSED = {
    "exceeded quota": f"ask for less ({N}CPUS, {N}MEMORY_GIB, {N}GPUS, DTRAIN_NODES), or have the quota raised",
    "PodSecurity": f"the namespace's standard forbids it: see {TEMPLATE}, and host: in {S}VOLUMES",
    "serviceaccount": f"create the service account, or change serviceAccountName in {TEMPLATE}",
    "no PriorityClass": f"change priorityClassName in {TEMPLATE}",
    "limits.": f"the namespace limits what a pod may ask for: see {N}CPUS and {N}MEMORY_GIB",
}
"""What the messages of refused pods hold → the remedy."""
_NO_ROOM = (
    f"lower {N}CPUS, {N}MEMORY_GIB or {N}GPUS, check nodeSelector, tolerations and affinity in {TEMPLATE}, or wait "
    "for machines"
)
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


def node_object(
    options: KubernetesSettings,
    launch: Mapping[str, Any],
    node_id: int,
    incarnation: int,
    command: Sequence[str],
    grace_seconds: float,
    excluded: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the Job of one incarnation of a node, which runs ``command``. ``grace_seconds``: from SIGTERM to
    SIGKILL. ``excluded``: the machines on which it is not placed."""
    labels = {
        "app.kubernetes.io/name": "dtrain",
        "app.kubernetes.io/component": "training",
        JOB: label_of(launch["job_id"]),
        LAUNCH: name_launch(launch),
        NODE: str(node_id),
        INCARNATION: str(incarnation),
    }
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
                "spec": without_hosts(pod_spec(options, command, grace_seconds, labels[LAUNCH]), excluded),
            },
        },
    }


def pod_spec(
    options: KubernetesSettings, command: Sequence[str], grace_seconds: float, launch_name: str
) -> dict[str, Any]:
    """Return the specification of a node's pod: ours, with what the pod template has in its place or beside it.
    Nodes of one launch are kept apart from each other, unless the template has an affinity."""
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
    if "affinity" not in template:
        term = {"labelSelector": {"matchLabels": {LAUNCH: launch_name}}, "topologyKey": "kubernetes.io/hostname"}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        spec["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return merge(spec, template)


def without_hosts(spec: Mapping[str, Any], excluded: Sequence[str]) -> dict[str, Any]:
    """Return the specification of a pod that is not placed on these machines, whatever its own affinity allows. By
    their names, not by a label: the label of the hostname may be another, and may be of several."""
    if not excluded:
        return dict(spec)
    affinity = spec.get("affinity", {})
    of_nodes = affinity.get("nodeAffinity", {})
    required = of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    wanted = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in excluded]
    terms = [  # of which any one is enough
        {**term, "matchFields": [*term.get("matchFields", []), *wanted]}
        for term in required.get("nodeSelectorTerms", [{}])
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {**required, "nodeSelectorTerms": terms}}
    return {**spec, "affinity": {**affinity, "nodeAffinity": {**of_nodes, **required}}}


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
    memory = f"{round(options.memory_gib * 1024)}Mi"
    limits = {"memory": memory, **({options.gpu_resource: str(options.gpus)} if options.gpus else {})}
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
        "resources": {"requests": {"cpu": f"{options.cpus:g}", **limits}, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
        # The last lines of the output stay with the pod's record where the program leaves no message of its own.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def seconds(text: str | None) -> float | None:
    """Return a time of Kubernetes as Unix seconds; None for None."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


def first_pod(pods: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the oldest of a Job's pods, the only one that counts; None where there is none."""
    return min(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["uid"]), default=None)


def read_node(
    job: Answer, pods: Sequence[dict[str, Any]], warnings: Sequence[Answer], now: float, known_uid: str | None = None
) -> EngineJob:
    """Return the state of a node.

    ``pods``: of this Job. ``warnings``: events of the type Warning, of anything. ``known_uid``: the pod that this Job
    had before, if one was seen; another pod in its place does not count, since an incarnation runs once.
    """
    labels, about = job["metadata"]["labels"], job["metadata"]
    base: dict[str, Any] = {
        "id": about["name"],
        "node_id": int(labels[NODE]),
        "incarnation": int(labels[INCARNATION]),
        "submitted_at": seconds(about["creationTimestamp"]),
    }
    pod = next((pod for pod in pods if pod["metadata"]["uid"] == known_uid), None) if known_uid else first_pod(pods)
    if pod is not None:
        return EngineJob(**base, **_of_pod(pod, job, warnings, now))
    return EngineJob(**base, **_without_pod(job, warnings, now, known_uid is not None))


def _without_pod(job: Answer, warnings: Sequence[Answer], now: float, had_one: bool) -> dict[str, Any]:
    conditions = {item["type"]: item for item in job.get("status", {}).get("conditions") or ()}
    conditions = {name: item for name, item in conditions.items() if item["status"] == "True"}
    if "Complete" in conditions:
        return {"state": "ended", "exit_code": 0, "ended_at": seconds(job["status"].get("completionTime"))}
    failed = conditions.get("Failed")
    if failed is not None or had_one or "deletionTimestamp" in job["metadata"]:
        own = failed is not None and failed.get("reason") == "DeadlineExceeded"
        said = "it ran for longer than the cluster allows" if own else "its pod was deleted"
        at = seconds(failed.get("lastTransitionTime")) if failed is not None else now
        return {"state": "ended", "lost": not own, "cause": "taken", "reason": said, "ended_at": at}
    if job["spec"].get("suspend"):
        queue = job["metadata"]["labels"].get(QUEUE)
        where = f"waits in Kueue's queue {queue} (kubectl describe workload)" if queue else "the Job is suspended"
        return {"state": "pending", "reason": where}
    refusal = _newest(warnings, job, "FailedCreate")
    return {"state": "pending", "reason": _with_remedy(refusal, _REFUSED) if refusal else ""}


def _of_pod(pod: Answer, job: Answer, warnings: Sequence[Answer], now: float) -> dict[str, Any]:
    status, phase = pod.get("status", {}), pod.get("status", {}).get("phase", "Pending")
    host = pod["spec"].get("nodeName") or ""
    container: Answer = next(iter(status.get("containerStatuses") or ()), {})
    state = container.get("state") or {}
    ended = state.get("terminated")
    times = (state.get("running") or ended or {}).get("startedAt") or (status.get("startTime") if host else None)
    facts: dict[str, Any] = {"host": host, "started_at": seconds(times)}
    is_deleted = "deletionTimestamp" in pod["metadata"] and "deletionTimestamp" not in job["metadata"]
    if ended or phase in ("Succeeded", "Failed"):
        return facts | {
            "state": "ended",
            "exit_code": _exit_code(ended.get("exitCode")) if ended else None,
            "lost": is_deleted or _is_taken_away(status),
            "cause": _cause_of(status, ended or {}, is_deleted),
            "reason": _why_ended(status, ended or {}),
            "ended_at": seconds((ended or {}).get("finishedAt")) or now,
        }
    unready = unanswered_since(pod)
    if "deletionTimestamp" in pod["metadata"]:
        gone = (seconds(pod["metadata"]["deletionTimestamp"]) or now) < now
        if not host or unready is not None or gone:
            said = f"machine {host} does not answer" if host else "its pod was deleted before it started"
            cause = "machine" if host else "taken"
            return facts | {"state": "ended", "lost": True, "cause": cause, "reason": said, "ended_at": unready or now}
    if phase == "Running":
        return facts | {"state": "running", "reason": f"machine {host} does not answer" if unready else ""}
    return {"state": "pending", "host": host, "reason": _why_pending(pod, status, state, warnings)}


def unanswered_since(pod: Answer) -> float | None:
    """Return since when the machine of a running pod does not answer, in Unix seconds; None where it does.

    The cluster then says that the pod is not ready, though its containers, when they were last heard of, were. Nodes
    themselves may be asked for only by administrators.
    """
    status = pod.get("status", {})
    ready = next((item for item in status.get("conditions") or () if item["type"] == "Ready"), None)
    containers = status.get("containerStatuses") or ()
    if ready is None or ready["status"] != "False" or not containers or not all(item["ready"] for item in containers):
        return None
    return seconds(ready.get("lastTransitionTime"))


def _is_taken_away(status: Answer) -> bool:
    disrupted = (item for item in status.get("conditions") or () if item["type"] == "DisruptionTarget")
    return status.get("reason") in TAKEN_AWAY or any(item["status"] == "True" for item in disrupted)


def _cause_of(status: Answer, ended: Answer, is_deleted: bool) -> str:
    if ended.get("reason") in ("OOMKilled", "StartError", "ContainerCannotRun"):
        return "program"
    if status.get("reason") == "NodeLost":
        return "machine"
    return "taken" if is_deleted or _is_taken_away(status) else ""


def _exit_code(code: int | None) -> int | None:
    """Return the exit code as the project counts: minus the number of a signal, which runtimes give as 128 + it."""
    return 128 - code if code is not None and 128 < code <= 128 + 64 else code


def _why_ended(status: Answer, ended: Answer) -> str:
    reason = ended.get("reason") or status.get("reason") or ""
    said = " ".join((ended.get("message") or status.get("message") or "").split())
    if reason == "OOMKilled":
        return f"out of memory: raise {N}MEMORY_GIB, or train with smaller batches"
    if reason in ("StartError", "ContainerCannotRun"):
        return f"its program could not be started: {said}; check {N}PYTHON and {S}IMAGE"
    if status.get("reason"):
        return f"{status['reason']}: {said}" if said else str(status["reason"])
    for item in status.get("conditions") or ():
        if item["type"] == "DisruptionTarget" and item["status"] == "True":
            return f"{item.get('reason', 'disrupted')}: {item.get('message', '')}".rstrip(": ")
    return ""


def _why_pending(pod: Answer, status: Answer, state: Answer, warnings: Sequence[Answer]) -> str:
    waiting = state.get("waiting") or {}
    if remedy := _WAITS.get(waiting.get("reason", "")):
        said = " ".join((waiting.get("message") or waiting["reason"]).split())
        return f"{waiting['reason']}: {said}; {remedy}"
    for item in status.get("conditions") or ():
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return f"no machine has room: {item.get('message', item.get('reason', ''))}; {_NO_ROOM}"
    if mount := _newest(warnings, pod, "FailedMount", "FailedAttachVolume"):
        return f"a volume cannot be mounted: {mount}; check {S}VOLUMES"
    if sandbox := _newest(warnings, pod, "FailedCreatePodSandBox"):
        return f"its machine cannot start it: {sandbox}"
    return "its machine is starting it" if pod["spec"].get("nodeName") else ""


def _newest(warnings: Sequence[Answer], about: Answer, *reasons: str) -> str:
    """Return the message of the newest of these events about an object; "" where there is none."""
    found = [
        event
        for event in warnings
        if event["involvedObject"].get("uid") == about["metadata"]["uid"] and event["reason"] in reasons
    ]
    newest = max(found, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None)
    return " ".join(newest["message"].split()) if newest else ""


def _with_remedy(message: str, remedies: Mapping[str, str]) -> str:
    remedy = next((text for part, text in remedies.items() if part in message), "")
    return f"no pod is created: {message}; {remedy}" if remedy else f"no pod is created: {message}"

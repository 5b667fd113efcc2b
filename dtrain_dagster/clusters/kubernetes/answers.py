"""What a cluster's answers mean: the JSON of a Job, its pods and their events → the state of a node, with the reason
and the remedy. Pure: what is asked, and what is done about it, belongs in `engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from dtrain_dagster.clusters.kubernetes.manifest import INCARNATION, NODE, QUEUE
from dtrain_dagster.clusters.supervision.engine import EngineJob

Answer = Mapping[str, Any]
S = "DTRAIN_KUBERNETES_"
TEMPLATE = f"{S}POD_TEMPLATE"
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
    "CreateContainerError": f"check {S}VOLUMES and {S}PYTHON",
}
_WAITS["ErrImagePull"] = _WAITS["ImagePullBackOff"]
_REFUSED = {
    "exceeded quota": f"ask for less ({S}CPU, {S}MEMORY, {S}GPUS, DTRAIN_NODES), or have the quota raised",
    "PodSecurity": f"the namespace's standard forbids it: see {TEMPLATE}, and host: in {S}VOLUMES",
    "serviceaccount": f"create the service account, or change {S}SERVICE_ACCOUNT",
    "no PriorityClass": f"change priorityClassName in {TEMPLATE}",
    "limits.": f"the namespace limits what a pod may ask for: see {S}CPU and {S}MEMORY",
}
"""What the messages of refused pods hold → the remedy."""
_NO_ROOM = (
    f"lower {S}CPU, {S}MEMORY or {S}GPUS, check nodeSelector, tolerations and affinity in {TEMPLATE}, or wait for "
    "machines"
)


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
        return {"state": "ended", "lost": not own, "reason": said, "ended_at": at}
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
            "reason": _why_ended(status, ended or {}),
            "ended_at": seconds((ended or {}).get("finishedAt")) or now,
        }
    unready = unanswered_since(pod)
    if "deletionTimestamp" in pod["metadata"]:
        gone = (seconds(pod["metadata"]["deletionTimestamp"]) or now) < now
        if not host or unready is not None or gone:
            said = f"machine {host} does not answer" if host else "its pod was deleted before it started"
            return facts | {"state": "ended", "lost": True, "reason": said, "ended_at": unready or now}
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


def _exit_code(code: int | None) -> int | None:
    """Return the exit code as the project counts: minus the number of a signal, which runtimes give as 128 + it."""
    return 128 - code if code is not None and 128 < code <= 128 + 64 else code


def _why_ended(status: Answer, ended: Answer) -> str:
    reason = ended.get("reason") or status.get("reason") or ""
    said = " ".join((ended.get("message") or status.get("message") or "").split())
    if reason == "OOMKilled":
        return f"out of memory: raise {S}MEMORY, or train with smaller batches"
    if reason in ("StartError", "ContainerCannotRun"):
        return f"its program could not be started: {said}; check {S}PYTHON and {S}IMAGE"
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

"""Kubernetes as an engine that runs one-node jobs: what is asked of the API, and how its refusals are told.

What the objects look like and what the answers mean belongs in `objects`, and what follows from them in
`dtrain_dagster.clusters.supervision`. The client is Kubernetes' own; it is imported where it is used.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dtrain_dagster.clusters.kubernetes.objects import (
    LAUNCH,
    first_pod,
    node_object,
    read_node,
)
from dtrain_dagster.clusters.submission import Request, process_lines, yaml_text
from dtrain_dagster.clusters.supervision.engine import (
    MAX_LOG_BYTES,
    Command,
    Engine,
    EngineError,
    EngineJob,
    EngineUnreachableError,
    name_launch,
)
from dtrain_dagster.settings.kubernetes import CONTAINER, KubernetesSettings
from trainer.node.environment import STOP_GRACE, read_duration

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

TIMEOUT_SECONDS = (5.0, 15.0)
"""For a connection, and for an answer."""
RIGHTS = (
    *(("batch", "jobs", "", verb) for verb in ("create", "list", "delete")),
    *(("", "pods", "", verb) for verb in ("list", "delete")),
    ("", "pods", "log", "get"),
    ("", "events", "", "list"),
)
"""What an identity needs in the namespace, as API group, resource, subresource and verb: what the methods of
`KubernetesEngine` ask for, and no more."""
PATIENCE_SECONDS = 60.0
"""Seconds for which a refusal of what was allowed before counts as a cluster that does not answer."""
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_ACCESS = "KUBECONFIG, and context in DTRAIN_KUBERNETES_OPTIONS"
_REFUSALS = {
    0: f"the kubeconfig's certificate authority is not this cluster's: see {_ACCESS}",
    401: f"the cluster does not recognise this identity: log in again, or set {_ACCESS}",
    403: "this identity may not do it, or a quota is used up: deploy/kubernetes has the rights that are needed",
    404: "there is no such namespace: create it, or set namespace in DTRAIN_KUBERNETES_OPTIONS",
    422: "the cluster rejects the object: correct the setting that it names (DTRAIN_KUBERNETES_OPTIONS)",
}


def refusal(what: str, status: int, said: str) -> EngineError:
    """Return the error of a request that the cluster has refused: its own words, and the remedy. Pure."""
    remedy = _REFUSALS.get(status, "see DTRAIN_KUBERNETES_OPTIONS in the settings")
    return EngineError(f"cannot {what}: {said} ({status}); {remedy}")


class KubernetesEngine(Engine):
    """One cluster, as the environment's kubeconfig or the pod's own service account reaches it."""

    hold_seconds = 10.0  # clouds that take machines away may leave pods no more than 15 s, whatever they ask for

    def __init__(self, options: KubernetesSettings, run_dir: str, command: Command) -> None:
        super().__init__(options, run_dir, command)
        self._refused_since: dict[str, float | None] = {}
        """Since when requests of a kind are refused that were allowed before; None: not now. An API server that has
        just started answers 403 until it has read its own roles."""
        self._pods: dict[str, str] = {}
        """The pod of each Job that was seen, by uid: a Job whose pod is deleted may make another, which is refused."""

    def submit(self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()) -> str:
        body = self.request(launch, node_id, incarnation, excluded)
        name = body["metadata"]["name"]
        with self._asking(f"submit node {node_id}", pass_over=(409,)):
            self._batch.create_namespaced_job(self._space, body, **_RAW)
        return str(name)

    def request(
        self, launch: Mapping[str, Any], node_id: int, incarnation: int, excluded: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the Job of an incarnation. Nothing is asked."""
        # The agent ends its ranks in order within it.
        grace = self.hold_seconds + read_duration(*STOP_GRACE, launch.get("env", {}), os.environ) + 10.0
        command = self.command(launch, node_id, incarnation)
        return node_object(self.options, launch, node_id, incarnation, command, grace, excluded)

    def describe(self, launch: Mapping[str, Any]) -> list[Request]:
        requests = []
        for node_id in range(launch["node_count"]):
            text = yaml_text(self.request(launch, node_id, 1))
            if node_id == 0:
                text = f"{process_lines(launch)}\n{text}"
            requests.append(Request(title=f"node {node_id}", form="yaml", text=text))
        return requests

    def list_jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        """Return the nodes of a launch that the cluster still knows. A pod that was made in the place of a deleted one
        is deleted, with its Job: an incarnation runs once."""
        selector = f"{LAUNCH}={name_launch(launch)}"
        jobs = self._items("list the jobs", self._batch.list_namespaced_job, label_selector=selector)
        pods = self._items("list the pods", self._core.list_namespaced_pod, label_selector=selector)
        by_job: dict[str, list[dict[str, Any]]] = {}
        for pod in pods:
            by_job.setdefault(pod["metadata"]["labels"].get("job-name", ""), []).append(pod)
        waits = any(pod["status"].get("phase") == "Pending" for pod in pods) or len(by_job) < len(jobs)
        warnings: list[dict[str, Any]] = []
        if waits:
            warnings = self._items("list the events", self._core.list_namespaced_event, field_selector="type=Warning")
        now, found = time.time(), []
        for job in jobs:
            name = job["metadata"]["name"]
            own = by_job.get(name, [])
            found.append(read_node(job, own, warnings, now, self._pods.get(name)))
            if (first := first_pod(own)) is not None:
                known = self._pods.setdefault(name, first["metadata"]["uid"])
                if any(each["metadata"]["uid"] != known for each in own):
                    self._delete(name, force=False)
        return found

    def cancel(self, ids: Sequence[str], force: bool) -> None:
        for name in ids:
            self._delete(name, force)

    def how_to_enter(self, job: EngineJob, address: str) -> str:
        given = {"kubeconfig": self.options.kubeconfig, "context": self.options.context}
        where = "".join(f" {shlex.quote(f'--{name}={value}')}" for name, value in given.items() if value)
        return f"kubectl{where} exec -it -n {self._space} job/{job.id} -c {CONTAINER} -- bash"

    def read_log(self, job_id: str) -> str | None:
        if (pod := first_pod(self._pods_of(job_id))) is None:
            return None
        with self._asking("read a log", pass_over=(400, 404)):
            answer = self._core.read_namespaced_pod_log(pod["metadata"]["name"], self._space, **_RAW)
            return bytes(answer.data)[-MAX_LOG_BYTES:].decode(errors="replace")
        return None

    def check(self) -> str:
        with self._asking("look at the namespace"):
            self._batch.list_namespaced_job(self._space, limit=1, **_RAW)
        for group, resource, part, verb in RIGHTS:
            right = {"group": group, "resource": resource, "subresource": part, "verb": verb}
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {"namespace": self._space, **right}},
            }
            with self._asking("ask for the rights"):
                answer = self._authorization.create_self_subject_access_review(review, **_RAW)
                if not json.loads(answer.data)["status"].get("allowed"):
                    what = f"{resource}/{part}" if part else resource
                    raise refusal(f"{verb} {what} in {self._space}", 403, "not allowed")
        return f"namespace {self._space} takes nodes from this identity"

    # ---

    @property
    def _space(self) -> str:
        return self.options.namespace

    @functools.cached_property
    def _client(self) -> ApiClient:
        try:
            from kubernetes import client, config
            from kubernetes.config.config_exception import ConfigException
        except ImportError:
            raise EngineError(
                "DTRAIN_CLUSTER=kubernetes needs the package kubernetes: pip install 'dtrain[kubernetes]'"
            ) from None
        configuration = client.Configuration()
        try:
            if self.options.kubeconfig is None and self.options.context is None and _in_cluster():
                config.load_incluster_config(client_configuration=configuration)
            else:
                config.load_kube_config(
                    self.options.kubeconfig,
                    self.options.context,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except (ConfigException, OSError) as error:
            raise EngineError(f"no cluster is configured: {error}; set {_ACCESS}") from None
        configuration.retries = False  # asked again by whoever polls
        return client.ApiClient(configuration)

    @functools.cached_property
    def _core(self) -> Any:
        return self._api("CoreV1Api")

    @functools.cached_property
    def _batch(self) -> Any:
        return self._api("BatchV1Api")

    @functools.cached_property
    def _authorization(self) -> Any:
        return self._api("AuthorizationV1Api")

    def _api(self, name: str) -> Any:
        connected = self._client  # raises where the package is missing
        from kubernetes import client

        return getattr(client, name)(connected)

    def _delete(self, name: str, force: bool) -> None:
        # In the foreground the Job stays until its pod has ended, so that its end can be seen.
        policy = "Background" if force else "Foreground"
        with self._asking("end a node", pass_over=(404,)):
            self._batch.delete_namespaced_job(name, self._space, propagation_policy=policy, **_RAW)
        if force:
            for pod in self._pods_of(name):
                with self._asking("end a pod", pass_over=(404,)):
                    self._core.delete_namespaced_pod(
                        pod["metadata"]["name"], self._space, grace_period_seconds=0, **_RAW
                    )

    def _pods_of(self, name: str) -> list[dict[str, Any]]:
        return self._items("list the pods", self._core.list_namespaced_pod, label_selector=f"job-name={name}")

    def _items(self, what: str, ask: Callable[..., Any], **arguments: Any) -> list[dict[str, Any]]:
        with self._asking(what):
            return list(json.loads(ask(self._space, **arguments, **_RAW).data)["items"])
        raise AssertionError("unreachable")

    @contextmanager
    def _asking(self, what: str, pass_over: Sequence[int] = ()) -> Iterator[None]:
        """Tell what went wrong with a request in the project's own errors; a status of ``pass_over`` is no fault, and
        ends the block."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            try:
                yield
                self._refused_since[_kind(what)] = None
            except AttributeError as error:  # the client stumbles over its own errors of TLS, which have no body
                if isinstance(error.__context__, ApiException):
                    raise error.__context__ from None
                raise
        except ApiException as error:
            if error.status in pass_over:
                return
            said = _message(error.body) or str(error.reason)
            if "CERTIFICATE_VERIFY_FAILED" in said:
                raise refusal(what, 0, said) from None
            if error.status in _TRANSIENT or not error.status or self._may_pass(what, error.status, said):
                raise EngineUnreachableError(f"cannot {what} now: {said}") from error
            raise refusal(what, error.status, said) from None
        except HTTPError as error:
            raise EngineUnreachableError(f"cannot {what}: the cluster does not answer ({error})") from error

    def _may_pass(self, what: str, status: int, said: str) -> bool:
        """Return whether a refusal may be over soon: of a request whose kind was allowed before, within
        `PATIENCE_SECONDS` of its first refusal."""
        kind, now = _kind(what), time.monotonic()
        if status not in (401, 403) or "exceeded quota" in said or kind not in self._refused_since:
            return False
        since = self._refused_since[kind] = self._refused_since[kind] or now
        return now - since < PATIENCE_SECONDS


_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": TIMEOUT_SECONDS}
"""Answers as the cluster gave them: what this client's version does not know must not be lost or refused."""


def _kind(what: str) -> str:
    """Return the kind of a request; a number at its end says which object it is about."""
    return what.rstrip(" 0123456789")


def _in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _message(body: Any) -> str:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return ""

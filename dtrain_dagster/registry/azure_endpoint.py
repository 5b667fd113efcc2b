"""The deployment of a registered model on a managed online endpoint of Azure ML: added, tried, then given the traffic.

The endpoint is there already: Azure's own tools make it, which say who may call it, and from where, and delete it.
`deploy` never takes away a deployment that works: a new one gets no traffic until it has answered real requests
correctly, and the old one keeps its traffic if anything fails. Every deployment is billed from its creation to its
deletion, used or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dtrain_dagster.clusters.azure_ml.client import request_id_of, request_note, words
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.registry.azure import fit_tags
from dtrain_dagster.registry.endpoint import EndpointCheck, ScoringEndpoint, ServingError, authorisation
from dtrain_dagster.registry.versions import RegisteredModel
from dtrain_dagster.support.audit import AuditLog
from dtrain_dagster.support.secrets import IDENTITY, redact, remember

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Environment, OnlineDeployment

MAX_RESOURCE_TAG = 256
"""Azure's limit of a tag's value on resources such as deployments, in characters."""
SERVING_PORT = 5001
"""The port on which a serving image listens, see ``deploy/azure/serving.Dockerfile``."""
DEADLINE_SECONDS = 3600.0
"""The longest time for an operation of the service."""
_LOG_LINES = 40


class DeploymentError(ClusterError):
    """A failure to deploy a model. The message says what went wrong, what is left, and what to do."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """The service's code of the error; "" where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployed:
    """The deployment that answers now."""

    deployment: str
    created: bool
    """False where this version was deployed before."""
    check: EndpointCheck


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An endpoint of a workspace, and the machines of the deployments that are made there."""

    client: MLClient
    endpoint: str
    instance_type: str = "Standard_DS3_v2"
    instance_count: int = 1
    image: str | None = None
    """A serving image in a registry that the endpoint's identity may pull from; None: Azure ML installs the model's
    packages by itself, for which the deployment needs the internet."""
    audit: AuditLog | None = None
    deadline_seconds: float = DEADLINE_SECONDS

    def traffic(self) -> dict[str, int]:
        """Return the deployments that get traffic, with their shares in percent. Raise `DeploymentError` where there is
        no such endpoint."""
        found = _endpoint(self.client, self.endpoint).traffic or {}
        return {name: share for name, share in found.items() if share}

    def set_traffic(self, traffic: Mapping[str, int]) -> None:
        """Give the traffic to these deployments."""
        endpoint = _endpoint(self.client, self.endpoint)
        endpoint.traffic = dict(traffic)
        begin = lambda: self.client.online_endpoints.begin_create_or_update(endpoint)  # noqa: E731
        finish(begin, self.deadline_seconds, "set traffic", self.endpoint, self.audit, traffic=dict(traffic))

    def ask(self, deployment: str | None = None) -> ScoringEndpoint:
        """Return the endpoint as an address to ask; see `named_endpoint`."""
        return named_endpoint(self.client, self.endpoint, "mlflow" if self.image else "azureml", deployment)

    def delete(self, name: str) -> bool:
        """Delete a deployment; return whether it is gone."""
        from azure.core.exceptions import ResourceNotFoundError

        begin = lambda: self.client.online_deployments.begin_delete(name=name, endpoint_name=self.endpoint)  # noqa: E731
        try:
            finish(begin, self.deadline_seconds, "delete deployment", f"{self.endpoint}/{name}", self.audit)
        except ResourceNotFoundError:
            return True
        except DeploymentError:
            return False
        return True


def finish(
    begin: Callable[[], Any],
    deadline_seconds: float,
    operation: str,
    target: str,
    audit: AuditLog | None,
    **details: Any,
) -> None:
    """Do a long operation and wait for its end. Raise `DeploymentError` if it fails or takes too long; a missing target
    is left to the caller."""
    from azure.core.exceptions import AzureError, ResourceNotFoundError

    with audit.operation(operation, target, **details) if audit else nullcontext():
        try:
            poller = begin()
            poller.wait(deadline_seconds)
            if not poller.done():
                raise DeploymentError(
                    f"{operation} {target}: no end after {deadline_seconds:.0f} s; look at it in the studio", "Timeout"
                )
            poller.result()
        except ResourceNotFoundError:
            raise
        except AzureError as error:
            code = str(
                getattr(getattr(error, "error", None), "code", None) or getattr(error, "status_code", None) or ""
            )
            said = words(error, 1000)
            note = request_note(request_id_of(error))
            raise DeploymentError(f"{operation} {target} failed ({code}): {said}{note}", code) from None


def deployment_name(model: RegisteredModel) -> str:
    """Return a name that is one per version of a model, so that deploying twice finds the first deployment."""
    return f"version-{model.version}"[:32]


def deploy(target: Target, model: RegisteredModel, check: Callable[[ScoringEndpoint], EndpointCheck]) -> Deployed:
    """Put a registered version behind the endpoint; return what answers now. Deployments that it takes the traffic from
    are deleted.

    ``check`` asks a scoring address for the model's numbers (`endpoint.check_endpoint` with a run directory). It is
    called twice: on the new deployment alone, before it gets traffic, and on the endpoint, afterwards. Raise
    `DeploymentError` if anything fails; the traffic is then as before, and a deployment that was made here is deleted
    again.
    """
    before, name = target.traffic(), deployment_name(model)
    created = _ensure_deployment(target, name, model)
    try:
        trial = check(target.ask(name))
        if not trial.passed:
            raise DeploymentError(f"deployment {name} does not answer as it should: {trial.message}")
        if before != {name: 100}:
            target.set_traffic({name: 100})
        live = check(target.ask())
        if not live.passed:
            raise DeploymentError(
                f"with the traffic on {name}, the endpoint does not answer as it should: {live.message}"
            )
    except BaseException as error:  # also an interruption: the former deployment must answer again
        left = _undo(target, name, before, created)
        if isinstance(error, DeploymentError):
            raise DeploymentError(f"{error}. {left}") from None
        raise
    for other in before.keys() - {name}:
        target.delete(other)
    return Deployed(deployment=name, created=created, check=live)


def named_endpoint(
    client: MLClient, name: str, dialect: Literal["mlflow", "azureml"] = "azureml", deployment: str | None = None
) -> ScoringEndpoint:
    """Return an endpoint of the workspace as an address to ask, with its key or this machine's identity. ``deployment``
    names one, whatever traffic it has. Raise `DeploymentError` where there is no such endpoint."""
    from azure.core.exceptions import AzureError

    found = _endpoint(client, name)
    key: list[str] = []

    def by_key() -> dict[str, str]:
        if not key:
            try:
                key.append(client.online_endpoints.get_keys(name).primary_key)
            except AzureError as error:
                raise ServingError(f"cannot be asked: this identity cannot get a key for it: {words(error)}") from None
            remember(key[0])
        return {"Authorization": f"Bearer {key[0]}"}

    return ScoringEndpoint(
        url=str(found.scoring_uri),
        dialect=dialect,
        headers=by_key if found.auth_mode == "key" else authorisation(IDENTITY),
        public_headers={"azureml-model-deployment": deployment} if deployment else {},
    )


def _endpoint(client: MLClient, name: str) -> Any:
    from azure.core.exceptions import ResourceNotFoundError

    try:
        return client.online_endpoints.get(name)
    except ResourceNotFoundError:
        raise DeploymentError(
            f"there is no endpoint {name} in {client.workspace_name}: create it first (docs/azure.md)"
        ) from None


def _ensure_deployment(target: Target, name: str, model: RegisteredModel) -> bool:
    """Return whether the deployment was made here. A working one of the same version is reused; a failed one is
    replaced."""
    from azure.ai.ml.entities import ManagedOnlineDeployment

    client = target.client
    known = {item.name: item for item in client.online_deployments.list(endpoint_name=target.endpoint)}
    if name in known:
        if known[name].provisioning_state == "Succeeded" and _is_of(known[name], model):
            return False
        if name in target.traffic():
            raise DeploymentError(
                f"deployment {name} of endpoint {target.endpoint} carries traffic, and is "
                f"{known[name].provisioning_state} or of another model than {model.name} {model.version}: move its "
                "traffic or delete it first"
            )
        target.delete(name)
    is_public = str(_endpoint(client, target.endpoint).public_network_access).lower() == "enabled"
    wanted = ManagedOnlineDeployment(
        name=name,
        endpoint_name=target.endpoint,
        model=f"azureml:{model.name}:{model.version}",
        environment=_environment(target.image) if target.image else None,
        instance_type=target.instance_type,
        instance_count=target.instance_count,
        egress_public_network_access=None if is_public else "Disabled",
        tags=fit_tags({"model": model.name, "version": model.version}, MAX_RESOURCE_TAG),
    )
    begin = lambda: client.online_deployments.begin_create_or_update(wanted)  # noqa: E731
    where = f"{target.endpoint}/{name}"
    spends = {"instance_type": target.instance_type, "instances": target.instance_count}
    try:
        finish(begin, target.deadline_seconds, "create deployment", where, target.audit, **spends)
    except BaseException as error:
        log = _log(client, target.endpoint, name)
        gone = target.delete(name)
        if not isinstance(error, DeploymentError):
            raise
        left = "It was deleted again" if gone else f"It could NOT be deleted and may cost: delete {where} by hand"
        raise DeploymentError(f"{error}. {left}; other deployments are as they were.{log}") from None
    return True


def _is_of(deployment: OnlineDeployment, model: RegisteredModel) -> bool:
    """Return whether a deployment is of this model. The service states the model's resource id,
    ``…/models/<name>/versions/<version>``."""
    text = str(deployment.model)
    return text.endswith((f"/models/{model.name}/versions/{model.version}", f"azureml:{model.name}:{model.version}"))


def _environment(image: str) -> Environment:
    """Return the environment of an image that serves by itself: MLflow's own scoring server, see
    ``deploy/azure/serving.Dockerfile``."""
    from azure.ai.ml.entities import Environment

    return Environment(
        name="dtrain-serving",
        image=image,
        inference_config={
            "liveness_route": {"path": "/ping", "port": SERVING_PORT},
            "readiness_route": {"path": "/ping", "port": SERVING_PORT},
            "scoring_route": {"path": "/invocations", "port": SERVING_PORT},
        },
    )


def _undo(target: Target, name: str, before: Mapping[str, int], created: bool) -> str:
    """Give the traffic back and delete the new deployment; return a sentence on what is left."""
    try:
        if target.traffic() != before:
            target.set_traffic(before)
    except Exception as error:  # the caller must get the first error; this one is added to it
        return (
            f"The traffic could NOT be given back to {dict(before) or 'none'} ({redact(str(error))[:200]}): set "
            f"it by hand, then delete {target.endpoint}/{name}"
        )
    kept = f"the traffic is on {', '.join(before)} as before" if before else "the endpoint has no traffic, as before"
    if not created:
        return f"{name} was there before and stays; {kept}"
    if target.delete(name):
        return f"It was deleted again; {kept}"
    return f"It could NOT be deleted and goes on costing: delete {target.endpoint}/{name} by hand; {kept}"


def _log(client: MLClient, endpoint: str, name: str) -> str:
    """Return the end of a deployment's log, or "" where there is none."""
    try:
        text = client.online_deployments.get_logs(name=name, endpoint_name=endpoint, lines=_LOG_LINES)
    except Exception:  # the deployment never came up; this error would hide the one that the caller must get
        return ""
    return f"\nIts log:\n{redact(str(text))[-4000:]}" if text else ""

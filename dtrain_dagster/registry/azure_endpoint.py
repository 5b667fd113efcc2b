"""The deployment of a registered model on a managed online endpoint of Azure ML: added, tried, then given the traffic.

`deploy` never takes away a deployment that works: a new one gets no traffic until it has answered real requests
correctly, and the old one keeps its traffic if anything fails. Every deployment is billed from its creation to its
deletion, used or not; `delete` ends that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dtrain_dagster.clusters.azure_ml.client import request_id_of, request_note, words
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.costs.meters import choose_size_price
from dtrain_dagster.registry.azure import fit_tags
from dtrain_dagster.registry.endpoint import EndpointCheck, ScoringEndpoint, ServingError, authorisation
from dtrain_dagster.registry.versions import RegisteredModel
from dtrain_dagster.support.audit import AuditLog
from dtrain_dagster.support.secrets import IDENTITY, redact, remember

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Environment, OnlineDeployment, OnlineEndpoint

MAX_RESOURCE_TAG = 256
"""Azure's limit of a tag's value on resources such as endpoints and deployments, in characters."""
SERVING_PORT = 5001
"""The port on which a serving image listens, see ``deploy/azure/serving.Dockerfile``."""
_NAME = re.compile(r"[a-z][a-z0-9-]{1,30}[a-z0-9]")
_LOG_LINES = 40


class DeploymentError(ClusterError):
    """A failure to deploy a model. The message says what went wrong, what is left, and what to do."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """The service's code of the error; "" where it has none."""


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
            raise DeploymentError(f"{operation} {target} failed ({code}): {said}{_hint(said)}{note}", code) from None


def _hint(said: str) -> str:
    """Return the remedy for the most frequent refusals."""
    lower = said.lower()
    if "quota" in lower:
        return " (ask for quota of this instance type for the endpoint's region, or choose a smaller one)"
    if "authorization" in lower or "forbidden" in lower:
        return " (the identity needs the roles in deploy/azure/README.md)"
    return ""


def usd_per_hour(client: MLClient, instance_type: str) -> float | None:
    """Return the list price in dollars per hour of an instance, Linux and not preemptible, as the workspace's region
    states it; None without one. A managed endpoint costs its instances and nothing else."""
    listed = []
    for size in client.compute.list_sizes():
        if str(size.name).lower() != instance_type.lower():
            continue
        prices = getattr(size, "estimated_vm_prices", None) or getattr(size, "estimatedVMPrices", None) or {}
        rows = _get(prices, "values_property", "values") or ()
        for row in () if callable(rows) else rows:
            system, tier, usd = (
                _get(row, *names)
                for names in (("os_type", "osType"), ("vm_tier", "vmTier"), ("retail_price", "retailPrice"))
            )
            listed.append((str(system), str(tier), float(usd or 0)))
    return choose_size_price(listed)


def _get(value: Any, *names: str) -> Any:
    """Return the first of several spellings: the client gives some answers as objects and some as the service sent
    them."""
    for name in names:
        found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if found is not None:
            return found
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """The settings of an endpoint and of the deployment behind it."""

    name: str
    """The endpoint's name, unique in the region: it becomes the host's name. 3 to 32 lower-case letters, digits and
    hyphens."""
    instance_type: str = "Standard_DS3_v2"
    instance_count: int = 1
    auth_mode: Literal["aad_token", "key"] = "aad_token"
    """"aad_token": callers' identities, with the role to score; "key": keys, for callers without an identity."""
    image: str | None = None
    """A serving image in a registry that the endpoint's identity may pull from; None: Azure ML installs the model's
    packages by itself, for which the deployment needs the internet."""
    identity: str | None = None
    """The resource id of a user-assigned identity; None: Azure gives the endpoint one of its own."""
    public_network_access: bool = False
    """Whether callers from outside the virtual network are admitted."""
    keep_previous: bool = False
    """Whether deployments that lost their traffic are kept, for a quick way back; they go on costing."""
    deadline_seconds: float = 3600.0
    """The longest time for each operation of the service."""
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise DeploymentError(
                f"{self.name!r} cannot be an endpoint's name: 3 to 32 lower-case letters, digits and hyphens, a letter "
                "first"
            )
        if self.instance_count < 1:
            raise DeploymentError(f"an endpoint needs at least one instance, not {self.instance_count}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployed:
    """The deployment that answers now."""

    endpoint: str
    deployment: str
    scoring_url: str
    created: bool
    """False where this version was deployed before."""
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    """The deployments without traffic that go on costing."""
    check: EndpointCheck
    usd_per_hour: float | None
    """The cost of all present deployments of this config; None where the instance type's price is not known."""

    def cost_note(self) -> str:
        """Return the cost and the command that ends it, as the end of a sentence."""
        price = "an unknown price" if self.usd_per_hour is None else f"{self.usd_per_hour:.2f} USD per hour"
        delete = f"python -m dtrain_dagster.registry.endpoints delete --name {self.endpoint}"
        return f"costs {price} until it is deleted, used or not: {delete}" + (
            f"; also for {', '.join(self.kept)}" if self.kept else ""
        )


def deployment_name(model: RegisteredModel) -> str:
    """Return a name that is one per version of a model, so that deploying twice finds the first deployment."""
    return f"version-{model.version}"[:32]


def deploy(
    client: MLClient,
    config: EndpointConfig,
    model: RegisteredModel,
    check: Callable[[ScoringEndpoint], EndpointCheck],
    audit: AuditLog | None = None,
) -> Deployed:
    """Put a registered version behind the endpoint, which is created where it is missing; return what answers now.

    ``check`` asks a scoring address for the model's numbers (`endpoint.check_endpoint` with a run directory). It is
    called twice: on the new deployment alone, before it gets traffic, and on the endpoint, afterwards. Raise
    `DeploymentError` if anything fails; the traffic is then as before, and a deployment that was made here is deleted
    again.
    """
    endpoint = _ensure_endpoint(client, config, audit)
    before = {name: share for name, share in (endpoint.traffic or {}).items() if share}
    name = deployment_name(model)
    created = _ensure_deployment(client, config, name, model, audit)
    try:
        trial = check(scoring_endpoint(client, config, name))
        if not trial.passed:
            raise DeploymentError(f"deployment {name} does not answer as it should: {trial.message}")
        if before != {name: 100}:
            _set_traffic(client, config, {name: 100}, audit)
        live = check(scoring_endpoint(client, config))
        if not live.passed:
            raise DeploymentError(
                f"with the traffic on {name}, the endpoint does not answer as it should: {live.message}"
            )
    except BaseException as error:  # also an interruption: the former deployment must answer again
        left = _undo(client, config, name, before, created, audit)
        if isinstance(error, DeploymentError):
            raise DeploymentError(f"{error}. {left}") from None
        raise
    others = [str(item.name) for item in _deployments(client, config.name) if item.name != name]
    removed = () if config.keep_previous else tuple(other for other in others if _delete(client, config, other, audit))
    kept = tuple(other for other in others if other not in removed)
    price = usd_per_hour(client, config.instance_type)
    return Deployed(
        endpoint=config.name,
        deployment=name,
        scoring_url=live.url,
        created=created,
        removed=removed,
        kept=kept,
        check=live,
        usd_per_hour=None if price is None else price * config.instance_count * (1 + len(kept)),
    )


def scoring_endpoint(client: MLClient, config: EndpointConfig, deployment: str | None = None) -> ScoringEndpoint:
    """Return the endpoint that `deploy` makes of a config, as an address to ask; see `named_endpoint`."""
    return named_endpoint(client, config.name, "mlflow" if config.image else "azureml", deployment)


def named_endpoint(
    client: MLClient, name: str, dialect: Literal["mlflow", "azureml"] = "azureml", deployment: str | None = None
) -> ScoringEndpoint:
    """Return an endpoint of the workspace as an address to ask, with its key or this machine's identity. ``deployment``
    names one, whatever traffic it has. Raise `DeploymentError` where there is no such endpoint."""
    from azure.core.exceptions import AzureError, ResourceNotFoundError

    try:
        found = client.online_endpoints.get(name)
    except ResourceNotFoundError:
        raise DeploymentError(f"there is no endpoint {name} in {client.workspace_name}: deploy first") from None
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


def delete(client: MLClient, name: str, audit: AuditLog | None = None, deadline_seconds: float = 3600.0) -> bool:
    """Delete an endpoint with all its deployments, so that it costs nothing more. Return False where there is none."""
    from azure.core.exceptions import ResourceNotFoundError

    try:
        client.online_endpoints.get(name)
        finish(lambda: client.online_endpoints.begin_delete(name), deadline_seconds, "delete endpoint", name, audit)
    except ResourceNotFoundError:
        return False
    return True


def _ensure_endpoint(client: MLClient, config: EndpointConfig, audit: AuditLog | None) -> OnlineEndpoint:
    from azure.ai.ml.entities import IdentityConfiguration, ManagedIdentityConfiguration, ManagedOnlineEndpoint
    from azure.core.exceptions import ResourceNotFoundError

    try:
        found = client.online_endpoints.get(config.name)
    except ResourceNotFoundError:
        found = None
    if found is not None and found.provisioning_state != "Failed":
        if found.auth_mode != config.auth_mode:
            raise DeploymentError(
                f"endpoint {config.name} authorises by {found.auth_mode}, not by {config.auth_mode}, which cannot be "
                "changed: say so in the config, or choose another name"
            )
        return found
    identity = None
    if config.identity:
        managed = ManagedIdentityConfiguration(resource_id=config.identity)
        identity = IdentityConfiguration(type="user_assigned", user_assigned_identities=[managed])
    wanted = ManagedOnlineEndpoint(
        name=config.name,
        auth_mode=config.auth_mode,
        identity=identity,
        public_network_access="Enabled" if config.public_network_access else "Disabled",
        tags=fit_tags(config.tags, MAX_RESOURCE_TAG),
        traffic={},
    )
    begin = lambda: client.online_endpoints.begin_create_or_update(wanted)  # noqa: E731
    finish(begin, config.deadline_seconds, "create endpoint", config.name, audit)
    return client.online_endpoints.get(config.name)


def _ensure_deployment(
    client: MLClient, config: EndpointConfig, name: str, model: RegisteredModel, audit: AuditLog | None
) -> bool:
    """Return whether the deployment was made here. A working one of the same version is reused; a failed one is
    replaced."""
    from azure.ai.ml.entities import ManagedOnlineDeployment

    known = {item.name: item for item in _deployments(client, config.name)}
    if name in known:
        if known[name].provisioning_state == "Succeeded" and _is_of(known[name], model):
            return False
        if (client.online_endpoints.get(config.name).traffic or {}).get(name):
            raise DeploymentError(
                f"deployment {name} of endpoint {config.name} carries traffic, and is "
                f"{known[name].provisioning_state} or of another model than {model.name} {model.version}: move its "
                "traffic or delete it first"
            )
        _delete(client, config, name, audit)
    wanted = ManagedOnlineDeployment(
        name=name,
        endpoint_name=config.name,
        model=f"azureml:{model.name}:{model.version}",
        environment=_environment(config.image) if config.image else None,
        instance_type=config.instance_type,
        instance_count=config.instance_count,
        egress_public_network_access=None if config.public_network_access else "Disabled",
        tags=fit_tags({**config.tags, "model": model.name, "version": model.version}, MAX_RESOURCE_TAG),
    )
    begin = lambda: client.online_deployments.begin_create_or_update(wanted)  # noqa: E731
    target = f"{config.name}/{name}"
    spends = {"instance_type": config.instance_type, "instances": config.instance_count}
    try:
        finish(begin, config.deadline_seconds, "create deployment", target, audit, **spends)
    except BaseException as error:
        log = _log(client, config.name, name)
        gone = _delete(client, config, name, audit)
        if not isinstance(error, DeploymentError):
            raise
        left = "It was deleted again" if gone else f"It could NOT be deleted and may cost: delete {target} by hand"
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


def _deployments(client: MLClient, endpoint: str) -> list[OnlineDeployment]:
    return list(client.online_deployments.list(endpoint_name=endpoint))


def _set_traffic(client: MLClient, config: EndpointConfig, traffic: Mapping[str, int], audit: AuditLog | None) -> None:
    endpoint = client.online_endpoints.get(config.name)
    endpoint.traffic = dict(traffic)
    begin = lambda: client.online_endpoints.begin_create_or_update(endpoint)  # noqa: E731
    finish(begin, config.deadline_seconds, "set traffic", config.name, audit, traffic=dict(traffic))


def _undo(
    client: MLClient,
    config: EndpointConfig,
    name: str,
    before: Mapping[str, int],
    created: bool,
    audit: AuditLog | None,
) -> str:
    """Give the traffic back and delete the new deployment; return a sentence on what is left."""
    try:
        now = {
            other: share for other, share in (client.online_endpoints.get(config.name).traffic or {}).items() if share
        }
        if now != before:
            _set_traffic(client, config, before, audit)
    except Exception as error:  # the caller must get the first error; this one is added to it
        return (
            f"The traffic could NOT be given back to {dict(before) or 'none'} ({redact(str(error))[:200]}): set "
            f"it by hand, then delete {config.name}/{name}"
        )
    kept = f"the traffic is on {', '.join(before)} as before" if before else "the endpoint has no traffic, as before"
    if not created:
        return f"{name} was there before and stays; {kept}"
    if _delete(client, config, name, audit):
        return f"It was deleted again; {kept}"
    return f"It could NOT be deleted and goes on costing: delete {config.name}/{name} by hand; {kept}"


def _delete(client: MLClient, config: EndpointConfig, name: str, audit: AuditLog | None) -> bool:
    """Delete a deployment; return whether it is gone."""
    from azure.core.exceptions import ResourceNotFoundError

    begin = lambda: client.online_deployments.begin_delete(name=name, endpoint_name=config.name)  # noqa: E731
    try:
        finish(begin, config.deadline_seconds, "delete deployment", f"{config.name}/{name}", audit)
    except ResourceNotFoundError:
        return True
    except DeploymentError:
        return False
    return True


def _log(client: MLClient, endpoint: str, name: str) -> str:
    """Return the end of a deployment's log, or "" where there is none."""
    try:
        text = client.online_deployments.get_logs(name=name, endpoint_name=endpoint, lines=_LOG_LINES)
    except Exception:  # the deployment never came up; this error would hide the one that the caller must get
        return ""
    return f"\nIts log:\n{redact(str(text))[-4000:]}" if text else ""

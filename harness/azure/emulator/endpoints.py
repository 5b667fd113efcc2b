"""Online endpoints and deployments: a deployment really serves its registered MLflow model."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from harness.azure.emulator.answers import (
    WS,
    Refusal,
    accepted,
    error_body,
    not_found,
    resource_id,
    resource_type,
    system_data,
)
from harness.azure.emulator.assets import by_id
from harness.azure.emulator.identity import Identity
from harness.azure.emulator.nodes import Guarded
from harness.azure.emulator.state import DATASTORE_CONTAINER, LOCATION, Cloud, Operation
from harness.azure.emulator.storage import Blobs
from harness.azure.emulator.tracking import free_port, run_python

PATH = WS + "/onlineEndpoints"
SERVE = Path(__file__).with_name("serve.py")
PROBES = {"failureThreshold": 30, "initialDelay": "PT10S", "period": "PT10S", "successThreshold": 1, "timeout": "PT2S"}
SETTINGS = {"maxConcurrentRequestsPerInstance": 1, "maxQueueWait": "PT0.5S", "requestTimeout": "PT5S"}


@dataclass(slots=True, kw_only=True)
class Deployment:
    name: str
    body: dict[str, Any]
    created: float
    state: str = "Creating"
    operation: Operation | None = None
    model: Future[Path] | None = None
    server: Guarded | None = None
    port: int = 0


@dataclass(slots=True, kw_only=True)
class Endpoint:
    name: str
    body: dict[str, Any]
    created: float
    state: str = "Creating"
    keys: dict[str, str] = field(default_factory=lambda: {"primaryKey": "", "secondaryKey": ""})
    deployments: dict[str, Deployment] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        return self.body["properties"].get("authMode") or "Key"

    @property
    def traffic(self) -> dict[str, int]:
        return self.body["properties"].get("traffic") or {}


class Serving:
    """The endpoints of a cloud, and the processes behind them."""

    def __init__(self, cloud: Cloud, blobs: Blobs, identity: Identity) -> None:
        self.cloud, self.blobs, self.identity = cloud, blobs, identity
        self.endpoints = cloud.endpoints
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="models")

    def find(self, name: str) -> Endpoint:
        if name not in self.endpoints:
            raise not_found("online endpoint", name)
        return self.endpoints[name]

    def tick(self) -> None:
        """A deployment is ready when its server answers, not before."""
        for endpoint in self.endpoints.values():
            for deployment in endpoint.deployments.values():
                if deployment.state == "Creating" and deployment.operation and deployment.model:
                    self._advance(endpoint, deployment, deployment.operation, deployment.model)

    def _advance(self, endpoint: Endpoint, deployment: Deployment, operation: Operation, model: Future[Path]) -> None:
        if not model.done():
            return
        if error := model.exception():
            return self._fail(deployment, operation, f"The model could not be downloaded: {error}")
        log = self.cloud.folder / "endpoints" / f"{endpoint.name}-{deployment.name}.log"
        if deployment.server is None:
            deployment.port = free_port()
            command = [sys.executable, str(SERVE), str(model.result()), str(deployment.port)]
            deployment.server = run_python(command, str(model.result()), str(log))
        elif deployment.server.gone():
            self._fail(deployment, operation, f"The container did not start:\n{log.read_text()[-2000:]}")
        elif operation.ends is None and _answers(deployment.port) and not operation.stuck:
            operation.ends = self.cloud.clock.now()

    def _fail(self, deployment: Deployment, operation: Operation, why: str) -> None:
        operation.error = error_body("ResourceNotReady", why)
        operation.ends = self.cloud.clock.now()

    def deploy(self, endpoint: Endpoint, name: str, body: dict[str, Any]) -> tuple[Deployment, Operation]:
        asked = body["properties"].get("model") or ""
        asset = by_id(self.cloud, asked)
        if asset is None:
            raise Refusal(400, "BadRequest", f"The model {asked!r} does not exist.")
        if asset.body["properties"].get("modelType") != "mlflow_model":
            raise Refusal(400, "BadRequest", "A model that is no mlflow_model needs code, which the emulator runs not.")
        if body["properties"].get("instanceType") not in self.cloud.sizes:
            why = f"The instanceType {body['properties'].get('instanceType')!r} is not supported in {LOCATION}."
            raise Refusal(400, "BadRequest", why)
        before = endpoint.deployments.get(name)
        if before:
            self.stop(before)
        made = Deployment(name=name, body=body, created=self.cloud.clock.now())
        endpoint.deployments[name] = made
        target = self.cloud.folder / "endpoints" / endpoint.name / name
        shutil.rmtree(target, ignore_errors=True)
        prefix = asset.body["properties"]["modelUri"].partition("/paths/")[2]
        made.model = self._threads.submit(self.blobs.download_folder, DATASTORE_CONTAINER, prefix, target)

        def apply() -> None:
            made.state = "Failed" if operation.error else "Succeeded"

        operation = self.cloud.begin("deployment.create", 0, apply)
        operation.ends = None  # when its server answers
        made.operation = operation
        return made, operation

    def stop(self, deployment: Deployment) -> None:
        if deployment.server:
            deployment.server.end(0)
            deployment.server.close()

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            for deployment in endpoint.deployments.values():
                self.stop(deployment)
        self._threads.shutdown(cancel_futures=True)

    def authorized(self, endpoint: Endpoint, authorization: str | None) -> None:
        """`Refusal` (401) without the endpoint's key, or, by its mode, a token."""
        token = (authorization or "").removeprefix("Bearer ")
        if endpoint.mode == "Key":
            if not any(secrets.compare_digest(token.encode(), key.encode()) for key in endpoint.keys.values()):
                raise Refusal(401, "AuthFailed", "key_auth_access_denied")
        else:
            self.identity.check(authorization, self.cloud.addresses.base)

    def chosen(self, endpoint: Endpoint, asked: str | None) -> Deployment:
        """The deployment that was asked for, else the one with most of the traffic."""
        name = asked or max(endpoint.traffic, key=lambda one: endpoint.traffic[one], default="")
        found = endpoint.deployments.get(name)
        if found is None or found.state != "Succeeded":
            raise Refusal(
                404, "DeploymentNotFound", f"No deployment takes requests of {endpoint.name} ({name or '–'})."
            )
        return found


def score(port: int, body: dict[str, Any]) -> Response:
    """As the service's MLflow server: ``input_data`` in, bare predictions out. Blocking."""
    given = body.get("input_data")
    if given is None:
        raise Refusal(400, "BadRequest", "The payload needs the key 'input_data'.")
    table = isinstance(given, dict) and {"columns", "data"} <= given.keys()
    translated = {"dataframe_split": given} if table else {"inputs": given}
    if "params" in body:
        translated["params"] = body["params"]
    with requests.Session() as session:
        session.trust_env = False
        answer = session.post(f"http://127.0.0.1:{port}/invocations", json=translated, timeout=60)
    if not answer.ok:
        return Response(answer.content, 400, media_type="application/json")
    return JSONResponse(answer.json()["predictions"])


def endpoint_routes(cloud: Cloud, serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.get(PATH, name="endpoint.list")
    async def listed() -> dict[str, Any]:
        return {"value": [describe(cloud, one) for one in serving.endpoints.values()], "nextLink": None}

    @router.get(PATH + "/{name}", name="endpoint.get")
    async def get(name: str) -> dict[str, Any]:
        return describe(cloud, serving.find(name))

    @router.put(PATH + "/{name}", name="endpoint.put")
    async def put(name: str, request: HttpRequest) -> JSONResponse:
        body = await request.json()
        before = serving.endpoints.get(name)
        traffic = body["properties"].get("traffic") or {}
        if unknown := traffic.keys() - (before.deployments if before else {}).keys():
            raise Refusal(400, "BadRequest", f"Traffic goes to deployments that do not exist: {', '.join(unknown)}.")
        if traffic and sum(traffic.values()) not in (0, 100):
            raise Refusal(400, "BadRequest", "The traffic of all deployments has to add up to 0 or 100.")
        endpoint = before or Endpoint(name=name, body=body, created=cloud.clock.now())
        endpoint.body, endpoint.state = body, "Updating" if before else "Creating"
        if before is None:
            keys = body["properties"].get("keys") or {}
            endpoint.keys = {which: keys.get(which) or secrets.token_urlsafe(24) for which in endpoint.keys}
            serving.endpoints[name] = endpoint

        def apply() -> None:
            endpoint.state = "Succeeded"

        operation = cloud.begin("endpoint.create", cloud.timing.deploy_seconds, apply)
        status = 200 if before else 201
        return accepted(cloud, request, operation, "mfeOperationsStatus", describe(cloud, endpoint), status)

    @router.delete(PATH + "/{name}", name="endpoint.delete")
    async def delete(name: str, request: HttpRequest) -> Response:
        endpoint = serving.endpoints.get(name)
        if endpoint is None:
            return Response(status_code=204)
        endpoint.state = "Deleting"

        def apply() -> None:
            for deployment in endpoint.deployments.values():
                serving.stop(deployment)
            serving.endpoints.pop(name, None)

        operation = cloud.begin("endpoint.delete", cloud.timing.delete_seconds, apply)
        return accepted(cloud, request, operation, "mfeOperationsStatus", None, 202)

    @router.post(PATH + "/{name}/listKeys", name="endpoint.keys")
    async def keys(name: str) -> dict[str, str]:
        return serving.find(name).keys

    @router.post(PATH + "/{name}/token", name="endpoint.token")
    async def token(name: str) -> dict[str, Any]:
        made = serving.identity.token(cloud.addresses.base, serving.find(name).name)
        expires = int(made["expires_on"])
        return {
            "accessToken": made["access_token"], "expiryTimeUtc": expires, "refreshAfterTimeUtc": expires - 600,
            "tokenType": "Bearer",
        }  # fmt: skip

    @router.post("/endpoints/{name}/score", name="endpoint.score")
    async def scored(name: str, request: HttpRequest) -> Response:
        endpoint = serving.find(name)
        serving.authorized(endpoint, request.headers.get("authorization"))
        chosen = serving.chosen(endpoint, request.headers.get("azureml-model-deployment"))
        answer = await asyncio.to_thread(score, chosen.port, await request.json())
        answer.headers["azureml-model-deployment"] = chosen.name
        return answer

    _deployments(router, cloud, serving)
    return router


def _deployments(router: APIRouter, cloud: Cloud, serving: Serving) -> None:
    path = PATH + "/{endpoint}/deployments"

    @router.get(path, name="deployment.list")
    async def listed(endpoint: str) -> dict[str, Any]:
        owner = serving.find(endpoint)
        return {"value": [describe_deployment(owner, one) for one in owner.deployments.values()], "nextLink": None}

    @router.get(path + "/{name}", name="deployment.get")
    async def get(endpoint: str, name: str) -> dict[str, Any]:
        owner = serving.find(endpoint)
        if name not in owner.deployments:
            raise not_found("deployment", name)
        return describe_deployment(owner, owner.deployments[name])

    @router.put(path + "/{name}", name="deployment.put")
    async def put(endpoint: str, name: str, request: HttpRequest) -> JSONResponse:
        owner = serving.find(endpoint)
        status = 200 if name in owner.deployments else 201
        made, operation = serving.deploy(owner, name, await request.json())
        body = describe_deployment(owner, made)
        return accepted(cloud, request, operation, "mfeOperationsStatus", body, status)

    @router.delete(path + "/{name}", name="deployment.delete")
    async def delete(endpoint: str, name: str, request: HttpRequest) -> Response:
        owner = serving.find(endpoint)
        deployment = owner.deployments.get(name)
        if deployment is None:
            return Response(status_code=204)
        if owner.traffic.get(name):
            raise Refusal(400, "BadRequest", f"Deployment {name} takes traffic; move it elsewhere first.")
        deployment.state = "Deleting"

        def apply() -> None:
            serving.stop(deployment)
            owner.deployments.pop(name, None)

        operation = cloud.begin("deployment.delete", cloud.timing.delete_seconds, apply)
        return accepted(cloud, request, operation, "mfeOperationsStatus", None, 202)

    @router.post(path + "/{name}/getLogs", name="deployment.logs")
    async def logs(endpoint: str, name: str) -> dict[str, str]:
        file = cloud.folder / "endpoints" / f"{endpoint}-{name}.log"
        return {"content": file.read_text() if file.exists() else ""}


def describe(cloud: Cloud, endpoint: Endpoint) -> dict[str, Any]:
    sent = {name: value for name, value in endpoint.body["properties"].items() if name != "keys"}
    where = f"{cloud.addresses.base}/endpoints/{endpoint.name}"
    return {
        "id": resource_id("onlineEndpoints", endpoint.name),
        "name": endpoint.name,
        "type": resource_type("onlineEndpoints"),
        "location": LOCATION,
        "kind": "Managed",
        "tags": endpoint.body.get("tags") or {},
        "identity": {"type": "SystemAssigned", "principalId": None, "tenantId": None},
        "systemData": system_data(endpoint.created),
        "properties": {
            "description": None, "compute": None, "mirrorTraffic": {}, "publicNetworkAccess": "Enabled",
            **sent,
            "properties": sent.get("properties") or {},
            "traffic": endpoint.traffic,
            "authMode": endpoint.mode,
            "provisioningState": endpoint.state,
            "scoringUri": f"{where}/score",
            "swaggerUri": f"{where}/swagger.json",
        },
    }  # fmt: skip


def describe_deployment(endpoint: Endpoint, deployment: Deployment) -> dict[str, Any]:
    sent = {name: value for name, value in deployment.body["properties"].items() if value is not None}
    return {
        "id": resource_id("onlineEndpoints", endpoint.name, "deployments", deployment.name),
        "name": deployment.name,
        "type": resource_type("onlineEndpoints", "deployments"),
        "location": LOCATION,
        "kind": "Managed",
        "tags": deployment.body.get("tags") or {},
        "identity": None,
        "sku": deployment.body.get("sku") or {"name": "Default", "tier": "Standard", "capacity": 1},
        "systemData": system_data(deployment.created),
        "properties": {
            "description": None, "environmentId": None, "codeConfiguration": None, "modelMountPath": "/var/azureml-app",
            "environmentVariables": {}, "requestSettings": SETTINGS, "livenessProbe": PROBES, "readinessProbe": PROBES,
            "appInsightsEnabled": False, "egressPublicNetworkAccess": "Enabled", "instanceType": "Standard_DS3_v2",
            "endpointComputeType": "Managed",
            **sent,
            "scaleSettings": {"scaleType": "Default", **(sent.get("scaleSettings") or {})},
            "properties": sent.get("properties") or {},
            "provisioningState": deployment.state,
        },
    }  # fmt: skip


def _answers(port: int) -> bool:
    """Does somebody listen? (MLflow's server does once the model is loaded.)"""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
        return True
    return False

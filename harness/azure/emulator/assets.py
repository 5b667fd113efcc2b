"""Versioned assets (codes, environments, models) and datastores. What was PUT is kept and given back with the
service's own fields; code and models are files in the storage account."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from harness.azure.azurite import ACCOUNT
from harness.azure.emulator.answers import WS, Refusal, not_found, resource_id, resource_type, system_data
from harness.azure.emulator.state import DATASTORE, DATASTORE_CONTAINER, Asset, Cloud
from harness.azure.emulator.storage import DATASTORE_AUTHS, Blobs

ARTIFACTS = "workspaceartifactstore"
"""The datastore for what runs leave; in the same container here."""
KINDS: dict[str, dict[str, Any]] = {
    "codes": {"description": None, "tags": {}, "properties": {}, "isAnonymous": False, "isArchived": False,
              "provisioningState": "Succeeded"},
    "environments": {"description": None, "tags": {}, "properties": {}, "isAnonymous": False, "isArchived": False,
                     "autoRebuild": "Disabled", "environmentType": "UserCreated", "osType": "Linux", "image": None,
                     "condaFile": None, "build": None, "inferenceConfig": None, "stage": None,
                     "provisioningState": "Succeeded"},
    "models": {"description": None, "tags": {}, "properties": {}, "isAnonymous": False, "isArchived": False,
               "flavors": {}, "modelType": "custom_model", "jobName": None, "stage": None,
               "provisioningState": "Succeeded"},
}  # fmt: skip


def asset_routes(cloud: Cloud, blobs: Blobs) -> APIRouter:
    router = APIRouter()
    for kind in KINDS:
        _versioned(router, cloud, kind)

    @router.post(WS + "/codes/{name}/versions/{version}/startPendingUpload", name="codes.upload")
    @router.post(WS + "/models/{name}/versions/{version}/startPendingUpload", name="models.upload")
    async def pending(name: str, version: str) -> dict[str, Any]:
        address, signed = await asyncio.to_thread(blobs.fresh_container)
        return {
            "pendingUploadId": None,
            "pendingUploadType": "TemporaryBlobReference",
            "blobReferenceForConsumption": {
                "blobUri": address,
                "storageAccountArmId": None,
                "credential": {"credentialType": "SAS", "sasUri": signed},
            },
        }

    @router.get(WS + "/datastores", name="datastores.list")
    async def datastores() -> dict[str, Any]:
        return {"value": [_datastore(cloud, DATASTORE)], "nextLink": None}

    @router.get(WS + "/datastores/{name}", name="datastores.get")
    async def datastore(name: str) -> dict[str, Any]:
        return _datastore(cloud, name)

    @router.post(WS + "/datastores/{name}/listSecrets", name="datastores.secrets")
    async def secrets(name: str, request: HttpRequest) -> dict[str, str]:
        _datastore(cloud, name)
        asked = await request.json() if await request.body() else {}
        return await asyncio.to_thread(
            blobs.datastore_secrets, cloud.datastore_auth, bool(asked.get("expirableSecret"))
        )

    return router


def _versioned(router: APIRouter, cloud: Cloud, kind: str) -> None:
    path = f"{WS}/{kind}"

    @router.get(path, name=f"{kind}.containers")
    async def containers() -> dict[str, Any]:
        names = dict.fromkeys(asset.name for asset in cloud.assets.values() if asset.kind == kind)
        return {"value": [_container(cloud, kind, name) for name in names], "nextLink": None}

    @router.get(path + "/{name}", name=f"{kind}.container")
    async def container(name: str) -> dict[str, Any]:
        return _container(cloud, kind, name)

    @router.get(path + "/{name}/versions", name=f"{kind}.list")
    async def versions(name: str, request: HttpRequest) -> dict[str, Any]:
        """With ``hash``: code of this content, under whatever name."""
        sha = request.query_params.get("hash")
        found = [
            asset
            for asset in cloud.assets.values()
            if asset.kind == kind
            and (_hash(asset) == sha if sha else asset.name == name)
            and not asset.body["properties"].get("isArchived")
        ]
        found.sort(key=lambda asset: asset.created, reverse=True)
        if top := request.query_params.get("$top"):
            found = found[: int(top)]
        return {"value": [describe(asset) for asset in found], "nextLink": None}

    @router.get(path + "/{name}/versions/{version}", name=f"{kind}.get")
    async def get(name: str, version: str) -> dict[str, Any]:
        return describe(find(cloud, kind, name, version))

    @router.put(path + "/{name}/versions/{version}", name=f"{kind}.put")
    async def put(name: str, version: str, request: HttpRequest) -> JSONResponse:
        body, now = await request.json(), cloud.clock.now()
        before = cloud.assets.get((kind, name, version))
        if before is None:
            made = Asset(kind=kind, name=name, version=version, body=body, created=now, modified=now)
            cloud.assets[kind, name, version] = made
            return JSONResponse(describe(made), 201)
        for field in ("codeUri", "modelUri", "image"):
            if body["properties"].get(field) != before.body["properties"].get(field):
                raise Refusal(409, "UserError", "Asset paths cannot be updated.")
        before.body, before.modified = body, now
        return JSONResponse(describe(before), 200)

    @router.delete(path + "/{name}/versions/{version}", name=f"{kind}.delete")
    async def delete(name: str, version: str) -> dict[str, Any]:
        cloud.assets.pop((kind, name, version), None)
        return {}


def _hash(asset: Asset) -> str | None:
    return (asset.body["properties"].get("properties") or {}).get("hash_sha256")


def find(cloud: Cloud, kind: str, name: str, version: str) -> Asset:
    """`Refusal` (404) if there is none."""
    if (kind, name, version) not in cloud.assets:
        raise not_found(kind.removesuffix("s"), f"{name}:{version}")
    return cloud.assets[kind, name, version]


def by_id(cloud: Cloud, arm_id: str) -> Asset | None:
    """The asset of an ARM id or of ``azureml:name:version``."""
    parts = arm_id.strip("/").split("/")
    if "versions" in parts and len(parts) >= 4:
        return cloud.assets.get((parts[-4], parts[-3], parts[-1]))
    name, _, version = arm_id.removeprefix("azureml:").rpartition(":")
    return next((a for a in cloud.assets.values() if (a.name, a.version) == (name, version)), None)


def describe(asset: Asset) -> dict[str, Any]:
    properties = KINDS[asset.kind] | {k: v for k, v in asset.body["properties"].items() if v is not None}
    return {
        "id": resource_id(asset.kind, asset.name, "versions", asset.version),
        "name": asset.version,
        "type": resource_type(asset.kind, "versions"),
        "properties": properties,
        "systemData": system_data(asset.created, asset.modified),
    }


def _container(cloud: Cloud, kind: str, name: str) -> dict[str, Any]:
    found = [asset for asset in cloud.assets.values() if (asset.kind, asset.name) == (kind, name)]
    if not found:
        raise not_found(f"{kind.removesuffix('s')} container", name)
    latest = max(found, key=lambda asset: asset.created)
    following = str(int(latest.version) + 1) if latest.version.isdigit() else "1"
    return {
        "id": resource_id(kind, name),
        "name": name,
        "type": resource_type(kind),
        "properties": {
            "description": None, "tags": {}, "properties": {}, "isArchived": False,
            "latestVersion": latest.version, "nextVersion": following, "provisioningState": "Succeeded",
        },
        "systemData": system_data(found[0].created),
    }  # fmt: skip


def _datastore(cloud: Cloud, name: str) -> dict[str, Any]:
    if name not in (DATASTORE, ARTIFACTS):
        raise not_found("datastore", name)
    return {
        "id": resource_id("datastores", name),
        "name": name,
        "type": resource_type("datastores"),
        "properties": {
            "description": None, "tags": {}, "properties": None, "isDefault": name == DATASTORE,
            "credentials": {"credentialsType": DATASTORE_AUTHS[cloud.datastore_auth]},
            "intellectualProperty": None, "resourceGroup": None, "subscriptionId": None,
            "datastoreType": "AzureBlob", "accountName": ACCOUNT, "containerName": DATASTORE_CONTAINER,
            "endpoint": cloud.addresses.storage_suffix, "protocol": "https",
            "serviceDataAccessAuthIdentity": "None",
        },
        "systemData": system_data(1.76e9),
    }  # fmt: skip

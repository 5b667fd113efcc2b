"""What lies around the workspace and only the doctor reads: granted permissions, the subnet, the nodes' identity. The
control verb ``around`` changes it, and what the workspace says: its fields are those of
`Around`.

Shapes: permissions as in Azure's REST reference (authorization, permissions/listForResource). The rest is assumed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fastapi import APIRouter, Request

from harness.azure.emulator.answers import WS, Refusal
from harness.azure.emulator.state import RESOURCE_GROUP, SUBSCRIPTION, Cloud

GROUP = "/subscriptions/{subscription}/resourceGroups/{group}/providers"
SUBNET = GROUP + "/Microsoft.Network/virtualNetworks/{network}/subnets/{name}"
IDENTITY = GROUP + "/Microsoft.ManagedIdentity/userAssignedIdentities/{name}"
PERMISSIONS = "/providers/Microsoft.Authorization/permissions"
SUBNET_ID = SUBNET.format(subscription=SUBSCRIPTION, group=RESOURCE_GROUP, network="network", name="nodes")
IDENTITY_ID = IDENTITY.format(subscription=SUBSCRIPTION, group=RESOURCE_GROUP, name="dtrain-nodes")
CLIENT_ID = "00000000-0000-4000-8000-00000000c11e"


@dataclasses.dataclass(slots=True)
class Around:
    """As it is in a subscription where everything is as it should be."""

    actions: list[str] = dataclasses.field(default_factory=lambda: ["*"])
    not_actions: list[str] = dataclasses.field(default_factory=list)
    prefix: str = "10.40.0.0/20"
    workspace: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Properties of the workspace that are other than usual."""


def around_routes(cloud: Cloud, around: Around, arm: APIRouter) -> APIRouter:
    """Before ``arm`` among the surface's routes, whose answers it changes."""
    router = APIRouter()
    usual = {getattr(route, "name", ""): getattr(route, "endpoint", None) for route in arm.routes}

    @router.get(WS, name="workspace.get")
    async def workspace() -> Any:
        document = await usual["workspace.get"]()
        return {**document, "properties": {**document["properties"], **around.workspace}}

    @router.get(WS + PERMISSIONS, name="permissions.list")
    async def permissions(request: Request) -> dict[str, Any]:
        """In two pages: what anybody may who reads, then the rest."""
        if "page" not in request.query_params:
            following = f"{cloud.addresses.base}{request.url.path}?{request.url.query}&page=2"
            return {"value": [_permission(["*/read"], [])], "nextLink": following}
        return {"value": [_permission(around.actions, around.not_actions)]}

    @router.get(SUBNET, name="subnet.get")
    async def subnet(name: str) -> dict[str, Any]:
        if name != "nodes":
            raise Refusal(404, "NotFound", f"Resource {name} not found.")
        return {"id": SUBNET_ID, "name": name, "properties": {"addressPrefix": around.prefix, "delegations": []}}

    @router.get(IDENTITY, name="identity.get")
    async def nodes_identity(name: str) -> dict[str, Any]:
        return {"id": IDENTITY_ID, "name": name, "properties": {"clientId": CLIENT_ID, "principalId": CLIENT_ID}}

    return router


def around_control(around: Around) -> APIRouter:
    """The verb of the control port, before those of `harness.azure.emulator.control`: no field puts all back."""
    router = APIRouter()

    @router.post("/control/around")
    async def change(request: Request) -> dict[str, Any]:
        asked = json.loads(await request.body() or b"{}")
        fields = {field.name for field in dataclasses.fields(around)}
        if unknown := asked.keys() - fields:
            raise Refusal(400, "BadRequest", f"there is no {', '.join(sorted(unknown))} around; there are: {fields}")
        for name, value in {**dataclasses.asdict(Around()), **asked}.items():
            setattr(around, name, value)
        return {"result": dataclasses.asdict(around)}

    return router


def _permission(actions: list[str], not_actions: list[str]) -> dict[str, list[str]]:
    return {"actions": actions, "notActions": not_actions, "dataActions": [], "notDataActions": []}

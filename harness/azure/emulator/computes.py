"""Computes: create, update, delete as long-running operations, and what they show of themselves."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from harness.azure.emulator.answers import WS, Refusal, accepted, error_body, not_found, resource_id, resource_type
from harness.azure.emulator.clock import duration_seconds, iso
from harness.azure.emulator.consistency import is_hidden
from harness.azure.emulator.faults import Fault
from harness.azure.emulator.foreign import foreign_computes
from harness.azure.emulator.refused import WrappedRefusal, refused_for_good, refused_later, wrapped
from harness.azure.emulator.scaling import drop
from harness.azure.emulator.state import LOCATION, Cloud, Compute, Operation

PATH = WS + "/computes"
NAME = re.compile(r"[a-zA-Z](?![a-zA-Z0-9-]*-\d+$)[a-zA-Z0-9-]{2,23}")
COUNTED = ("idle", "running", "preparing", "unusable", "leaving", "preempted")


def compute_routes(cloud: Cloud) -> APIRouter:
    router = APIRouter()

    @router.get(PATH, name="compute.list")
    async def listed() -> dict[str, Any]:
        known = cloud.computes.values()
        shown = [it for it in known if not is_hidden(cloud, "compute", it.name, it.created, "list")]
        own = [describe(cloud, compute) for compute in shown]
        return {"value": [*foreign_computes().values(), *own], "nextLink": None}

    @router.get(PATH + "/{name}", name="compute.get")
    async def get(name: str) -> dict[str, Any]:
        return foreign_computes().get(name) or describe(cloud, _found(cloud, name))

    @router.put(PATH + "/{name}", name="compute.put")
    async def put(name: str, request: HttpRequest) -> JSONResponse:
        body = await request.json()
        _check(cloud, name, body)
        before = cloud.computes.get(name)
        compute, operation = _create(cloud, name, body) if before is None else _update(cloud, before, body)
        # 201 and Creating for a change, too (azure-sdk-assets, test_aml_compute_create_and_delete.json at 003b900b).
        answer = describe(cloud, compute)
        answer["properties"]["provisioningState"] = "Creating"
        return accepted(cloud, request, operation, "computeOperationsStatus", answer, 201)

    @router.delete(PATH + "/{name}", name="compute.delete")
    async def delete(name: str, request: HttpRequest) -> Response:
        compute = cloud.computes.get(name)
        if compute is None:
            return Response(status_code=204)
        for job in cloud.jobs.values():
            if job.compute == name and job.live:
                job.cancel_requested = True
        compute.state = "Deleting"

        def apply() -> None:
            for node in list(compute.nodes):
                drop(cloud, compute, node)
            if cloud.computes.get(name) is compute:
                del cloud.computes[name]

        operation = cloud.begin("compute.delete", cloud.timing.delete_seconds, apply)
        return accepted(cloud, request, operation, "computeOperationsStatus", None, 202)

    @router.post(PATH + "/{name}/listNodes", name="compute.nodes")
    async def nodes(name: str) -> dict[str, Any]:
        compute = _found(cloud, name)
        return {
            "nodes": [
                {
                    "nodeId": node.id,
                    "privateIpAddress": f"10.0.0.{4 + node.number % 250}",
                    "publicIpAddress": None,
                    "port": 50000 + node.number,
                    "nodeState": node.state,
                    "runId": node.job,
                }
                for node in compute.nodes
            ],
            "nextLink": None,
        }

    return router


def _found(cloud: Cloud, name: str) -> Compute:
    compute = cloud.computes.get(name)
    if compute is None or is_hidden(cloud, "compute", name, compute.created, "get"):
        raise not_found("compute", name)
    return compute


def _check(cloud: Cloud, name: str, body: dict[str, Any]) -> None:
    """What the service refuses at once: what is wrong in form. All else it refuses later, see `refused_later`."""
    if not NAME.fullmatch(name):
        why = f"The compute name {name!r} is not valid: 3 to 24 letters, digits and hyphens, at the end no -number."
        raise Refusal(400, "BadRequest", why)
    properties = body.get("properties") or {}
    if properties.get("computeType") != "AmlCompute":
        raise Refusal(400, "BadRequest", "The emulator has computes of computeType AmlCompute only.")
    settings = properties.get("properties") or {}
    compute = Compute(name="", body=body, created=0, modified=0)
    if compute.vm_size not in cloud.sizes:
        raise Refusal(
            400, "BadRequest", f"The specified vmSize {settings.get('vmSize')} is not supported in {LOCATION}."
        )
    if settings.get("vmPriority") not in (None, "Dedicated", "LowPriority"):
        why = f"vmPriority is {settings['vmPriority']!r}; there are Dedicated and LowPriority."
        raise Refusal(400, "BadRequest", why)
    if compute.min_nodes > compute.max_nodes:
        raise Refusal(400, "BadRequest", "minNodeCount must not be above maxNodeCount.")
    if idle := (settings.get("scaleSettings") or {}).get("nodeIdleTimeBeforeScaleDown"):
        try:
            duration_seconds(idle)
        except ValueError as error:
            raise Refusal(400, "BadRequest", str(error)) from None


def _create(cloud: Cloud, name: str, body: dict[str, Any]) -> tuple[Compute, Operation]:
    now = cloud.clock.now()
    compute = Compute(name=name, body=body, created=now, modified=now)
    fault = cloud.faults.refusal(compute.vm_size, compute.tier)
    if fault and fault["how"] == "sync":
        raise WrappedRefusal(fault["status"], *_refused(fault, compute), fault["nesting"])
    cloud.computes[name] = compute
    told = wrapped(*_refused(fault, compute), fault["nesting"]) if fault else None
    settles = fault is not None and fault["how"] == "settled"
    error = refused_later(cloud, compute) or (None if settles else told)
    compute.refusals = [{"error": told}] if settles else refused_for_good(cloud.sizes[compute.vm_size], compute)
    operation = cloud.begin("compute.create", cloud.timing.create_seconds, _settle(compute, error), error)
    compute.operation = operation
    return compute, operation


def _update(cloud: Cloud, compute: Compute, body: dict[str, Any]) -> tuple[Compute, Operation]:
    if compute.operation and compute.state in ("Creating", "Updating") and body == compute.body:
        return compute, compute.operation  # the same once more, by someone who did not get the answer
    if compute.state in ("Creating", "Deleting", "Updating"):
        why = f"Compute {compute.name} is {compute.state}; another operation is not possible until it has ended."
        raise Refusal(409, "Conflict", why)
    new = Compute(name=compute.name, body=body, created=0, modified=0)
    if (new.vm_size, new.tier) != (compute.vm_size, compute.tier):
        why = f"Compute {compute.name} exists; its vmSize and vmPriority cannot be changed: delete it first."
        raise Refusal(400, "BadRequest", why)
    if compute.state == "Failed":
        why = f"Compute {compute.name} is in a failed state; delete it before it is created again."
        raise Refusal(409, "Conflict", why)
    compute.body, compute.modified, compute.state = body, cloud.clock.now(), "Updating"
    why = f"Compute {compute.name} could not be changed."
    error = error_body("InternalServerError", why) if cloud.faults.fails("compute.update") else None
    settle = _settle(compute, error)
    compute.operation = operation = cloud.begin("compute.update", cloud.timing.create_seconds, settle, error)
    return compute, operation


def _settle(compute: Compute, error: dict[str, Any] | None) -> Any:
    def apply() -> None:
        if compute.state != "Deleting":
            compute.state = "Failed" if error else "Succeeded"
            compute.errors = [{"error": error}] if error else []

    return apply


def _refused(fault: Fault, compute: Compute) -> tuple[str, str]:
    by_default = {
        "sync": ("SkuNotAvailable", f"The size {compute.vm_size} ({compute.tier}) is not available in {LOCATION}."),
        "settled": (
            "UnsupportedVMSizeForLowPriority",
            f"The VM size {compute.vm_size.upper()} is not allowed for LowPriority. Please convert to Dedicated or use "
            "a different VM size.",
        ),
        "async": ("AllocationFailed", f"Allocation of {compute.vm_size} ({compute.tier}) failed: not enough capacity."),
    }[fault["how"]]
    return fault["code"] or by_default[0], fault["message"] or by_default[1]


def describe(cloud: Cloud, compute: Compute) -> dict[str, Any]:
    """As GET shows it. What nodes there are is null until it has been created, and while it is updated."""
    settled = compute.state in ("Succeeded", "Deleting")
    shown = compute.refusals if cloud.clock.now() >= compute.created + cloud.timing.refusal_seconds else []
    sent: dict[str, Any] = compute.body["properties"].get("properties") or {}
    live = compute.usable
    counts = {f"{state}NodeCount": sum(node.state == state for node in compute.nodes) for state in COUNTED}
    asked = compute.asked > 0
    resizing = asked or any(node.state in ("preparing", "leaving") for node in compute.nodes)
    identity = compute.body.get("identity")
    return {
        "id": resource_id("computes", compute.name),
        "name": compute.name,
        "type": resource_type("computes"),
        "location": compute.body.get("location") or LOCATION,
        "tags": compute.body.get("tags"),
        "sku": None,
        "identity": _identity(identity) if identity else None,
        "properties": {
            "createdOn": iso(compute.created),
            "modifiedOn": iso(compute.modified),
            "disableLocalAuth": compute.body["properties"].get("disableLocalAuth", False),
            "description": compute.body["properties"].get("description"),
            "resourceId": None,
            "computeType": "AmlCompute",
            "computeLocation": compute.body["properties"].get("computeLocation") or LOCATION,
            "provisioningState": compute.state,
            "provisioningErrors": compute.errors or None,
            "provisioningWarnings": {},
            "isAttachedCompute": False,
            "properties": {
                **sent,
                # In capitals, whatever was sent: recorded in answers to PUTs (azure-sdk-assets, as above), and where
                # computes are listed (azure-powershell, Get-AzMLWorkspaceCompute.Recording.json at 49be303a).
                "vmSize": compute.vm_size.upper(),
                "vmPriority": "LowPriority" if compute.tier == "low_priority" else "Dedicated",
                "scaleSettings": {
                    "maxNodeCount": compute.max_nodes,
                    "minNodeCount": compute.min_nodes,
                    "nodeIdleTimeBeforeScaleDown": f"PT{int(compute.idle_seconds)}S",
                },
                "subnet": sent.get("subnet"),
                "osType": "Linux",
                "virtualMachineImage": None,
                "isolatedNetwork": sent.get("isolatedNetwork", False),
                "propertyBag": None,
                "errors": (shown or compute.allocation_errors or None) if settled else None,
                "remoteLoginPortPublicAccess": sent.get("remoteLoginPortPublicAccess") or "NotSpecified",
                "allocationState": ("Resizing" if resizing else "Steady") if settled else None,
                "allocationStateTransitionTime": iso(compute.allocation_changed or compute.created)
                if settled
                else None,
                "currentNodeCount": len(live) if settled else None,
                "targetNodeCount": len(live) + int(asked) if settled else None,
                "nodeStateCounts": counts if settled else None,
            },
        },
    }


def _identity(sent: dict[str, Any]) -> dict[str, Any]:
    made = {"type": sent.get("type"), "principalId": None, "tenantId": None}
    users = sent.get("userAssignedIdentities")
    if users is not None:
        known = {
            "principalId": "00000000-0000-4000-8000-00000000000c",
            "clientId": "00000000-0000-4000-8000-00000000000d",
        }
        made["userAssignedIdentities"] = dict.fromkeys(users, known)
    if "SystemAssigned" in (sent.get("type") or ""):
        made["principalId"] = "00000000-0000-4000-8000-00000000000e"
    return made

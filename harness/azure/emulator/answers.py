"""The shapes that all answers of ARM share: errors, resources, long-running operations."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from harness.azure.emulator.clock import iso
from harness.azure.emulator.state import LOCATION_ID, WORKSPACE_ID, Cloud, Operation

WS = (
    "/subscriptions/{subscription}/resourceGroups/{group}"
    "/providers/Microsoft.MachineLearningServices/workspaces/{workspace}"
)


class Refusal(Exception):
    """An error that the caller is told in ARM's words."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers

    def answer(self) -> JSONResponse:
        return JSONResponse({"error": error_body(self.code, self.message)}, self.status, self.headers)


def error_body(code: str, message: str) -> dict[str, Any]:
    return {
        "code": code,
        "message": message,
        "target": None,
        "details": [],
        "additionalInfo": [{"type": "Emulated", "info": {"value": True}}],
    }


NOT_FOUND = {
    # Reported: Azure/azureml-previews#267 (2021-04-22) of jobs, Azure/AutoML-vNext-Preview#3 (2021-04-23) of their
    # history. The other words are assumed.
    "job": ("UserError", "Job {name} not found."),
    "run": ("UserError", "Run {name} was not found"),
}


def not_found(kind: str, name: str) -> Refusal:
    code, words = NOT_FOUND.get(kind, ("ResourceNotFound", f"Requested {kind} does not exist: {{name}}"))
    return Refusal(404, code, words.format(name=name))


def scope_not_found(word: str, name: str, path: str) -> Refusal:
    """A subscription, a resource group or a workspace (``word``, as in the path) that is not there. The words are
    from MicrosoftLearning/mslearn-azure-ml#27 (groups, and what lies in a workspace), hashicorp/terraform#8859 (the
    workspace itself) and azure-powershell's tests (subscriptions)."""
    if word == "subscriptions":
        return Refusal(404, "SubscriptionNotFound", f"The subscription '{name}' could not be found.")
    if word == "resourceGroups":
        return Refusal(404, "ResourceGroupNotFound", f"Resource group '{name}' could not be found.")
    if path.rstrip("/").endswith(f"/workspaces/{name}"):
        parts = path.split("/")
        group = parts[parts.index("resourceGroups") + 1] if "resourceGroups" in parts else ""
        kind = f"Microsoft.MachineLearningServices/workspaces/{name}"
        return Refusal(404, "ResourceNotFound", f"The Resource '{kind}' under resource group '{group}' was not found.")
    why = f"Can not perform requested operation on nested resource. Parent resource '{name}' not found."
    return Refusal(404, "ParentResourceNotFound", why)


def resource_id(*parts: str) -> str:
    return "/".join((WORKSPACE_ID, *parts))


def resource_type(*parts: str) -> str:
    return "/".join(("Microsoft.MachineLearningServices/workspaces", *parts))


def system_data(created: float, modified: float | None = None) -> dict[str, Any]:
    return {
        "createdAt": iso(created),
        "createdBy": "Emulated Identity",
        "createdByType": "Application",
        "lastModifiedAt": iso(created if modified is None else modified),
        "lastModifiedBy": "Emulated Identity",
        "lastModifiedByType": "Application",
    }


def accepted(
    cloud: Cloud, request: HttpRequest, operation: Operation, path: str, body: Any, status: int
) -> JSONResponse:
    """The first answer of a long-running operation. ``path``: computeOperationsStatus, mfeOperationsStatus…"""
    version = request.query_params.get("api-version", "")
    there = f"{cloud.addresses.base}{LOCATION_ID}/{path}/{operation.id}?api-version={version}&service=new"
    # No Retry-After, so whoever polls waits as long as it likes. Computes: this header alone (azure-powershell,
    # New-AzMLWorkspaceCompute.Recording.json at 70f1c487); all else has two more (WorkspaceCleanRemove at 49be303a).
    headers = {"Azure-AsyncOperation": there}
    if path == "mfeOperationsStatus":
        headers["Location"] = there.replace("OperationsStatus", "OperationResults")
        headers["x-ms-async-operation-timeout"] = "PT30M"
    return JSONResponse(body, status, headers)


def operation_status(operation: Operation) -> JSONResponse:
    body: dict[str, Any] = {"status": operation.status, "id": operation.id, "name": operation.id}
    if operation.status == "Failed":
        body["error"] = operation.error
    return JSONResponse(body, 200)

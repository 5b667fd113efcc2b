"""Computes of other people in the workspace, of every kind: they are listed with ours, and none is ours to touch."""

from __future__ import annotations

from typing import Any

from harness.azure.emulator.answers import resource_id, resource_type
from harness.azure.emulator.clock import iso
from harness.azure.emulator.state import LOCATION

ATTACHED = ("Kubernetes", "AKS", "VirtualMachine", "Databricks", "SynapseSpark", "HDInsight", "DataFactory",
            "DataLakeAnalytics")  # fmt: skip
"""Of which the workspace knows an address and little more: the reference calls their ``properties`` optional."""
UNKNOWN = "ManagedGpuPool"
"""A kind that is newer than any client."""


def foreign_computes() -> dict[str, dict[str, Any]]:
    """As the service lists them, by name."""
    instance = {
        # As recorded (azure-powershell, Get-AzMLWorkspaceCompute.Recording.json at 49be303a), shortened.
        "vmSize": "STANDARD_DS3_V2", "imageVersion": None, "subnet": None,
        "sshSettings": {"sshPublicAccess": "Disabled", "adminUserName": "azureuser", "sshPort": 50000,
                        "adminPublicKey": None},
        "autologgerSettings": None, "errors": [], "applications": [], "state": "Running", "lastOperation": {
            "operationName": "Create", "operationTime": iso(1.76e9), "operationStatus": "Succeeded",
            "operationTrigger": "User"},
        "createdBy": {"userOrgId": "72f988bf-86f1-41af-91ab-2d7cd011db47", "userId": "6205f759"},
        "applicationSharingPolicy": "Shared", "computeInstanceAuthorizationType": None, "setupScripts": None,
        "personalComputeInstanceSettings": None, "schedules": {"computeStartStop": []}, "enableNodePublicIp": True,
        "dataMounts": None, "dataDisks": None, "containers": None, "versions": {"runtime": "3.0.02755.0006"},
        "customServices": [],
    }  # fmt: skip
    young = {
        # As recorded right after a PUT without a priority (azure-powershell, New-AzMLWorkspaceCompute.Recording.json
        # at 70f1c487): capitals, and null wherever nothing was said.
        "vmSize": "STANDARD_DS3_V2", "vmPriority": None, "subnet": None, "currentNodeCount": None,
        "scaleSettings": {"maxNodeCount": 8, "minNodeCount": 0, "nodeIdleTimeBeforeScaleDown": None},
        "targetNodeCount": None, "nodeStateCounts": None, "allocationState": None, "errors": None,
        "remoteLoginPortPublicAccess": "NotSpecified", "osType": "Linux", "virtualMachineImage": None,
        "isolatedNetwork": False, "enableNodePublicIp": True, "enableBatchPrivateLink": False,
    }  # fmt: skip
    made = [
        _compute("their-instance", "ComputeInstance", instance),
        _compute("their-young-cluster", "AmlCompute", young, state="Creating", tags=None),
        *(_compute(f"their-{kind.lower()}", kind, None, attached=True) for kind in ATTACHED),
        _compute("their-newest", UNKNOWN, {"quantumDepth": 3}),
        # A workspace keeps what has lost its resource.
        _compute("their-lost-cluster", "Kubernetes", None, attached=True, state="Unknown", location=None),
    ]
    return {compute["name"]: compute for compute in made}


def _compute(
    name: str,
    kind: str,
    properties: dict[str, Any] | None,
    attached: bool = False,
    state: str = "Succeeded",
    tags: dict[str, str] | None = {},  # noqa: B006  (never changed)
    location: str | None = LOCATION,
) -> dict[str, Any]:
    resource = f"/subscriptions/s/resourceGroups/g/providers/Theirs/{kind}/{name}" if attached else None
    return {
        "id": resource_id("computes", name),
        "name": name,
        "type": resource_type("computes"),
        "location": location,
        "tags": tags,
        "properties": {
            "createdOn": iso(1.76e9),
            "modifiedOn": iso(1.76e9),
            "disableLocalAuth": False,
            "description": None,
            "resourceId": resource,
            "computeType": kind,
            "computeLocation": location,
            "provisioningState": state,
            "provisioningErrors": None,
            "provisioningWarnings": {},
            "isAttachedCompute": attached,
            "properties": properties,
        },
    }

"""Azure Resource Manager: the cloud's metadata, the workspace, sizes, usages, and how operations are doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from harness.azure.emulator.answers import WS, not_found, operation_status, system_data
from harness.azure.emulator.capacity import usage_rows
from harness.azure.emulator.certificates import ACCOUNT
from harness.azure.emulator.state import (
    LOCATION,
    RESOURCE_GROUP,
    SUBSCRIPTION,
    TENANT,
    WORKSPACE,
    WORKSPACE_ID,
    Cloud,
    Size,
)

LOCATIONS = "/subscriptions/{subscription}/providers/Microsoft.MachineLearningServices/locations/{location}"


def arm_routes(cloud: Cloud) -> APIRouter:
    router = APIRouter()

    @router.get("/metadata/endpoints", name="metadata.get")
    async def metadata() -> list[dict[str, Any]]:
        base = f"{cloud.addresses.base}/"
        return [
            {
                "name": "EmulatedCloud",
                "portal": "https://portal.azure.com",
                "resourceManager": base,
                "authentication": {
                    "loginEndpoint": base,
                    "audiences": [base, "https://management.azure.com/"],
                    "tenant": "common",
                    "identityProvider": "AAD",
                },
                "graph": base,
                "suffixes": {
                    "storage": cloud.addresses.storage_suffix,
                    "keyVaultDns": "vault.localhost",
                    "acrLoginServer": "azurecr.localhost",
                },
            }
        ]

    @router.get(WS, name="workspace.get")
    async def workspace() -> dict[str, Any]:
        return _workspace(cloud)

    @router.get("/discovery/workspaces/{workspace}", name="discovery.get")
    async def discovery() -> dict[str, str]:
        """Where the workspace's own services are; without a token, as the real one."""
        names = ["api", "catalog", "experimentation", "gallery", "history", "hyperdrive", "labeling"]
        names += ["modelmanagement", "pipelines", "registry", "studio"]
        return dict.fromkeys(names, cloud.addresses.base)

    @router.get(LOCATIONS + "/vmSizes", name="sizes.list")
    async def sizes() -> dict[str, Any]:
        return {"value": [_size(name, size) for name, size in cloud.sizes.items()]}

    @router.get(LOCATIONS + "/usages", name="usages.list")
    async def usages() -> dict[str, Any]:
        return {"value": usage_rows(cloud), "nextLink": None}

    for kind in ("computeOperationsStatus", "mfeOperationsStatus"):

        @router.get(f"{LOCATIONS}/{kind}/{{id}}", name="operation.get")
        async def status(id: str) -> Any:
            if id not in cloud.operations:
                raise not_found("operation", id)
            return operation_status(cloud.operations[id])

    return router


def _workspace(cloud: Cloud) -> dict[str, Any]:
    base = cloud.addresses.base
    group = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{RESOURCE_GROUP}/providers"
    return {
        "id": WORKSPACE_ID,
        "name": WORKSPACE,
        "type": "Microsoft.MachineLearningServices/workspaces",
        "location": LOCATION,
        "tags": {},
        "etag": None,
        "kind": "Default",
        "sku": {"name": "Basic", "tier": "Basic"},
        "identity": {"type": "SystemAssigned", "principalId": TENANT, "tenantId": TENANT},
        "systemData": system_data(1.76e9),
        "properties": {
            "friendlyName": WORKSPACE,
            "description": "Emulated on loopback",
            "storageAccount": f"{group}/Microsoft.Storage/storageAccounts/{ACCOUNT}",
            "keyVault": f"{group}/Microsoft.KeyVault/vaults/emulated",
            "applicationInsights": f"{group}/Microsoft.Insights/components/emulated",
            "containerRegistry": None,
            "hbiWorkspace": False,
            "imageBuildCompute": None,
            "publicNetworkAccess": "Enabled",
            "provisioningState": "Succeeded",
            "workspaceId": "00000000-0000-4000-8000-00000000000b",
            "discoveryUrl": f"{base}/discovery/workspaces/{WORKSPACE}",
            # With a scheme of its own, as the Tracking service of jobs is recorded (azure-powershell,
            # Get-AzMLWorkspaceJob.Recording.json at 49be303a).
            "mlFlowTrackingUri": f"{base.replace('https://', 'azureml://')}/mlflow/v1.0{WORKSPACE_ID}",
            "notebookInfo": None,
            "tenantId": TENANT,
        },
    }


def _size(name: str, size: Size) -> dict[str, Any]:
    # As recorded of Standard_D16ads_v5 (azure-powershell, Get-AzMLServiceVMSize.Recording.json, 2025-11-04): in no
    # order, Windows at 0.046 more per vCPU, and Linux once more at the price of Windows.
    windows = round(size.linux_standard_usd_per_hour + 0.046 * size.vcpus, 2)
    prices = [("Linux", "Standard", windows), ("Windows", "Standard", windows)]
    prices.append(("Linux", "Standard", size.linux_standard_usd_per_hour))
    if size.low_priority_capable:
        low = size.linux_low_priority_usd_per_hour
        prices[1:1] = [(system, "LowPriority", round(0.4 * windows, 2)) for system in ("Linux", "Windows")]
        prices.append(("Linux", "LowPriority", low))
    return {
        "name": name,
        "family": size.family,
        "vCPUs": size.vcpus,
        "gpus": size.gpus,
        "osVhdSizeMB": 1047552,
        "maxResourceVolumeMB": 344064,
        "memoryGB": float(size.memory_gb),
        "lowPriorityCapable": size.low_priority_capable,
        "premiumIO": True,
        "supportsIB": size.infiniband,
        "estimatedVMPrices": {
            "billingCurrency": "USD",
            "unitOfMeasure": "OneHour",
            "values": [{"retailPrice": price, "osType": system, "vmTier": tier} for system, tier, price in prices],
        },
        "supportedComputeTypes": size.compute_types,
    }

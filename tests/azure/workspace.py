"""The emulated workspace as the product is told of it."""

from __future__ import annotations

from typing import Any

from dtrain_dagster.settings.azure import AzureMLOptions
from harness.azure.emulator import Emulator


def options(emulator: Emulator, **fields: Any) -> AzureMLOptions:
    """What settings would say, with short pauses."""
    environment = emulator.environment
    known: dict[str, Any] = {
        "subscription_id": environment["DTRAIN_AZURE_SUBSCRIPTION_ID"],
        "resource_group": environment["DTRAIN_AZURE_RESOURCE_GROUP"],
        "workspace": environment["DTRAIN_AZURE_WORKSPACE"],
        "storage_uri": environment["DTRAIN_STORAGE"],
        "image": "registry.example/dtrain:1",
        "poll_seconds": 0.2,
        "polling_interval_seconds": 1,
    }
    return AzureMLOptions(**{**known, **fields})

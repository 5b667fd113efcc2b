"""What the emulator decides, without a process: faults, and what the contract finds."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from harness.azure.emulator.contract import schemas_folder, violations

SCHEMAS = schemas_folder()
COMPUTE = {
    "method": "PUT",
    "operation": "compute.put",
    "query": {"api-version": "2023-08-01-preview"},
    "path": "/workspaces/w/computes/gpu",
    "body": {
        "location": "eastus",
        "properties": {
            "computeType": "AmlCompute",
            "properties": {"vmSize": "Standard_NC6s_v3", "scaleSettings": {"maxNodeCount": 3}},
        },
    },
}


AZURES = pytest.mark.skipif(
    SCHEMAS is None,
    reason="Azure's schemas are not here, so what clients send was held against our own alone: set DTRAIN_ARM_SCHEMAS",
)


@pytest.mark.parametrize("folder", [None, pytest.param(SCHEMAS, marks=AZURES)], ids=["ours", "azures"])
def test_the_contract_finds_wrong_words_wrong_types_and_unknown_keys(folder: Path | None) -> None:
    assert violations([COMPUTE], folder) == []
    for name, value, says in (
        ("vmPriority", "Lowpriority", "'Lowpriority' is not one of"),
        ("scaleSettings", {"maxNodeCount": "three"}, "maxNodeCount"),
        ("idleTime", 600, "unknown key .properties.properties.idleTime"),
    ):
        planted = copy.deepcopy(COMPUTE)
        planted["body"]["properties"]["properties"][name] = value  # type: ignore[index]
        found = violations([planted], folder)
        assert len(found) == 1
        assert says in found[0]

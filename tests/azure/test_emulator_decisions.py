"""What the emulator decides, without a process: faults, and what the contract finds."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from harness.azure.emulator.contract import schemas_folder, violations
from harness.azure.emulator.faults import Faults


def test_faults_strike_as_often_as_they_were_told() -> None:
    faults = Faults()
    faults.add({"fault": "throttle", "operation": "job.*", "count": 2}, now=0)
    struck = [faults.of_request(name) is not None for name in ("compute.get", "job.get", "job.put", "job.get")]
    assert struck == [False, True, True, False]
    faults.add({"fault": "capacity", "vm_size": "Standard_NC*", "count": 1}, now=0)
    assert faults.capacity("Standard_NC6s_v3", "dedicated", "gpu", now=1) == 0
    assert faults.capacity("Standard_NC6s_v3", "dedicated", "gpu", now=1) > 100
    faults.add({"fault": "capacity", "until": 60, "nodes": 1}, now=100)
    assert [min(faults.capacity("any", "dedicated", "gpu", now), 9) for now in (101, 159, 160)] == [1, 1, 9]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"fault": "flood"}, "there are: throttle"),
        ({"fault": "slow", "job": "x"}, "slow has no job"),
        ({"fault": "drop", "moment": "never"}, "before, after"),
    ],
)
def test_a_fault_that_cannot_be_says_what_there_is(spec: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Faults().add(spec, now=0)


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

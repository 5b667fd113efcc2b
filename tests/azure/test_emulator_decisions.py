"""What the emulator decides, without a process: the autoscaler, the clock, faults, and what the contract finds."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest

from harness.azure.emulator.clock import Clock
from harness.azure.emulator.contract import schemas_folder, violations
from harness.azure.emulator.faults import Faults
from harness.azure.emulator.nodes import Guarded
from harness.azure.emulator.scaling import to_release, wanted_nodes
from harness.azure.emulator.state import Node


@pytest.mark.parametrize(
    ("limits", "busy", "asked", "wanted"),
    [
        ((0, 3), 0, [], 0),
        ((1, 3), 0, [], 1),
        ((0, 3), 0, [2], 2),
        ((0, 3), 2, [1], 3),
        ((0, 3), 2, [2, 1], 2),  # the first in the queue has to wait, and so has whoever is behind
        ((0, 3), 3, [], 3),
    ],
)
def test_nodes_are_wanted_for_what_runs_and_for_the_head_of_the_queue(
    limits: tuple[int, int], busy: int, asked: list[int], wanted: int
) -> None:
    assert wanted_nodes(*limits, busy, asked) == wanted


def test_only_nodes_idle_for_long_enough_are_released() -> None:
    nodes = [
        Node(id=str(since), number=0, state=state, since=since, allocated=0)
        for state, since in (("idle", 0), ("idle", 50), ("running", 0), ("idle", 90))
    ]
    released = to_release(nodes, wanted=1, maximum=4, idle_seconds=60, now=100)
    assert [node.id for node in released] == ["0"]
    shrunk = to_release(nodes, wanted=1, maximum=2, idle_seconds=60, now=100)
    assert [node.id for node in shrunk] == ["0", "50"], "a smaller maximum does not wait"


def test_a_skipped_hour_passes_in_steps() -> None:
    clock, seen = Clock(), []
    start = clock.now()
    clock.advance(3600, lambda: seen.append(clock.now()))
    assert len(seen) == 3600
    assert seen == sorted(seen)
    assert clock.now() - start >= 3600
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-1, lambda: None)


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


def test_a_process_that_ends_at_once_is_noticed() -> None:
    """Whoever starts children and waits for any of them has to be the only one who waits."""
    here = {"environment": {}, "folder": "/", "output": "/dev/null"}
    for _ in range(10):
        works = Guarded([{"command": command, **here} for command in (["/bin/true"], ["/bin/false"], ["/bin/true"])])
        while not works.gone():
            time.sleep(0.005)
        assert works.codes == {0: 0, 1: 1, 2: 0}
        works.close()

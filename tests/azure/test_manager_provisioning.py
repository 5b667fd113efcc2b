"""What an Azure ML cluster buys against the emulator, with the real clients, and what it leaves behind."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from dtrain_dagster.clusters.base import ClusterError, NoCapacityError
from harness.azure.emulator.around import SUBNET_ID
from tests.azure.stage import A100, H100, V100, Stage

pytestmark = pytest.mark.slow


def test_goes_down_the_chain_and_leaves_nothing_behind(stage: Stage) -> None:
    stage.control("fault", fault="refuse", vm_size=V100, how="sync", count=None)
    stage.control("fault", fault="refuse", vm_size=A100, how="async", count=None)
    manager = stage.manager()
    config = manager.provision_cluster(3, V100)
    assert (config.gpu_type, config.tier, config.node_count) == (H100, "dedicated", 3)
    assert [(a.sku, a.code, a.decision) for a in manager.attempts] == [
        (V100, "SkuNotAvailable", "next"),
        (A100, "AllocationFailed", "next"),
        (H100, "Succeeded", "created"),
    ]
    assert list(stage.computes()) == [f"{stage.name}-nc40adsh100v5"]
    body = next(s["body"] for s in stage.asked("compute.put") if s["path"].endswith("h100v5"))
    sent = body["properties"]["properties"]
    assert sent["scaleSettings"] == {
        "minNodeCount": 0, "maxNodeCount": 3, "nodeIdleTimeBeforeScaleDown": "PT10M",
    }  # fmt: skip
    assert (sent["vmPriority"], sent["enableNodePublicIp"]) == ("Dedicated", False)
    assert sent["remoteLoginPortPublicAccess"] == "Disabled"
    assert body["identity"]["type"] == "SystemAssigned"
    lines = manager.audit.lines()
    assert Counter((line["operation"], line["result"], line.get("code")) for line in lines) == {
        ("compute.put", "failed", "SkuNotAvailable"): 1,
        ("compute.put", "failed", "AllocationFailed"): 1,
        ("compute.delete", "done", None): 1,
        ("compute.put", "done", None): 1,
    }
    changes = {s["request_id"]: s["operation"] for s in stage.asked("compute.*") if s["method"] != "GET"}
    assert {line["request_id"]: line["operation"] for line in lines} == changes, "what Azure's support asks for"
    assert all(any(number in a.message for number in changes) for a in manager.attempts if a.decision == "next")


def test_buys_nothing_in_another_region_than_the_one_whose_prices_count(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_REGION", "westus2")
    with pytest.raises(ClusterError, match=r"is in eastus, .* those of westus2: set DTRAIN_REGION=eastus"):
        stage.manager().provision_cluster(1, V100)
    assert not stage.asked("compute.put")


def test_asks_before_it_buys_and_takes_what_fits(stage: Stage) -> None:
    manager = stage.manager(tiers=("low_priority",), subnet=SUBNET_ID)
    stage.control("quota", family="low_priority", cores=3 * 24)
    try:
        config = manager.provision_cluster(3, H100)  # 40 cores each
        assert [a.code for a in manager.attempts] == ["QuotaTooSmall", "Succeeded"]
        assert (config.gpu_type, config.tier) == (V100, "spot")
    finally:
        stage.control("quota", family="low_priority", cores=1000)
    (seen,) = stage.asked("compute.put")
    sent = seen["body"]["properties"]["properties"]
    assert sent["vmPriority"] == "LowPriority"
    assert sent["subnet"]["id"] == SUBNET_ID
    stage.manager(tiers=("low_priority",), subnet=SUBNET_ID).provision_cluster(2, V100)
    assert len(stage.asked("compute.put")) == 1
    bigger = stage.manager(tiers=("low_priority",), subnet=SUBNET_ID).provision_cluster(4, V100)
    assert bigger.max_nodes == 4
    assert len(stage.computes()) == 1


def test_no_capacity_says_what_was_tried_and_when_to_ask_again(stage: Stage) -> None:
    stage.control("fault", fault="refuse", how="async", count=None)
    with pytest.raises(NoCapacityError, match="Total Regional Spot vCPUs") as refused:
        stage.manager().provision_cluster(3, V100)
    assert [attempt["code"] for attempt in refused.value.attempts] == ["AllocationFailed"] * 3
    assert refused.value.retry_at > time.time()
    assert not stage.computes()


def test_an_operation_that_hangs_is_given_up_and_cleaned_away(stage: Stage) -> None:
    stage.control("fault", fault="stuck", operation="compute.create")
    manager = stage.manager(operation_seconds=2.0)
    assert manager.provision_cluster(3, V100).gpu_type == A100
    assert manager.attempts[0].code == "OperationTimedOut"
    assert len(stage.computes()) == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_lost_answers_cost_nothing(stage: Stage, moment: str) -> None:
    for fault in ("drop", "error"):
        stage.control("fault", fault=fault, operation="compute.put", moment=moment)
    assert stage.manager().provision_cluster(3, V100).gpu_type == V100
    assert len(stage.computes()) == 1


def test_scales_by_saying_all_of_it_again(stage: Stage) -> None:
    manager = stage.manager()
    manager.provision_cluster(3, V100)
    assert manager.scale_cluster(5)
    assert not stage.manager().scale_cluster(5)
    sent = stage.asked("compute.put")[-1]["body"]["properties"]["properties"]
    assert sent["scaleSettings"]["maxNodeCount"] == 5
    assert sent["scaleSettings"]["nodeIdleTimeBeforeScaleDown"] == "PT10M"
    assert sent["enableNodePublicIp"] is False

"""What sizes with GPUs need of a job, and which cannot train."""

from __future__ import annotations

from datetime import date

import pytest

from dtrain_dagster.clusters.azure_ml.jobs import shared_memory_of
from dtrain_dagster.clusters.azure_ml.sku_chain import (
    DEFAULT_CHAIN,
    explain_retired,
    explain_shared_gpu,
    node_environment_of,
    spell_sku,
)
from dtrain_dagster.costs.prices import hardware_of, skus

TODAY = date(2026, 11, 1)


@pytest.mark.parametrize("sku", skus())
def test_nccl_looks_for_infiniband_where_a_size_has_it_and_nowhere_else(sku: str) -> None:
    found = node_environment_of(sku)
    assert found["NCCL_IB_DISABLE"] == ("0" if hardware_of(sku).infiniband else "1")
    assert found["NCCL_SOCKET_IFNAME"] == "eth"
    assert node_environment_of(sku.upper()) == found, "as the service spells it"


def test_an_unknown_size_is_left_to_nccl() -> None:
    assert node_environment_of("Standard_ND128isr_GB300_v6") == {}


@pytest.mark.parametrize("sku", ["Standard_NV6ads_A10_v5", "Standard_NV18ads_A10_v5", "Standard_NC24ads_A100_MIG_v4"])
def test_parts_of_a_gpu_do_not_train_together(sku: str) -> None:
    assert "NCCL cannot connect" in explain_shared_gpu(sku, 2)
    assert explain_shared_gpu(sku, 1) == "", "alone it needs no NCCL"
    assert not any(explain_shared_gpu(whole, 8) for whole in (*DEFAULT_CHAIN, *skus()))


def test_a_retired_size_is_named_with_one_that_can_be_bought() -> None:
    said = explain_retired("Standard_NC6s_v3", TODAY)
    assert "2025-09-30" in said
    assert "DTRAIN_GPU_TYPE=Standard_NC24ads_A100_v4" in said
    assert explain_retired("Standard_NC6s_v3", date(2025, 1, 1)) == ""
    assert not any(explain_retired(sku, TODAY) for sku in (*DEFAULT_CHAIN, "Standard_Unknown"))


def test_sizes_are_spelled_as_in_the_price_table() -> None:
    assert spell_sku("STANDARD_NC6S_V3") == "Standard_NC6s_v3"
    assert spell_sku("STANDARD_DS2_V2") == "STANDARD_DS2_V2"


def test_several_ranks_share_more_memory_than_the_services_default_and_no_node_is_filled() -> None:
    assert shared_memory_of(1) == "2g"
    for sku in skus():
        node = hardware_of(sku)
        gigabytes = int(shared_memory_of(node.gpus).removesuffix("g"))
        assert gigabytes == (2 if node.gpus == 1 else 8 * node.gpus)
        assert gigabytes <= node.memory_gib / 10, sku

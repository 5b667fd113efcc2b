"""How much memory the ranks of a node may share, as the service is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain_dagster.clusters.azure_ml.jobs import shared_memory_of
from dtrain_dagster.costs.prices import hardware_of, skus
from tests.azure.stage import V100, end

TWO_GPUS = "Standard_NC48ads_A100_v4"


def test_several_ranks_get_more_than_the_services_default_and_no_node_is_filled() -> None:
    assert shared_memory_of(1) == "2g"
    for sku in skus():
        node = hardware_of(sku)
        gigabytes = int(shared_memory_of(node.gpus).removesuffix("g"))
        assert gigabytes == (2 if node.gpus == 1 else 8 * node.gpus)
        assert gigabytes <= node.memory_gib / 10, sku


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sku", "ranks", "expected"), [pytest.param(V100, 1, "2g", marks=pytest.mark.long), (TWO_GPUS, 2, "16g")]
)
def test_a_job_is_sent_with_it(stage: Any, sku: str, ranks: int, expected: str) -> None:
    manager = stage.manager(chain=(sku,), processes_per_node=ranks)
    manager.provision_cluster(1, sku)
    spec = stage.spec(manager, nodes=1, processes_per_node=ranks)
    manager.submit_job(spec)
    end(manager, spec)
    [put] = stage.asked("job.put")
    assert put["body"]["properties"]["resources"]["shmSize"] == expected

"""The nodes that studies of a plan are run on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_job import write_dataset

from dtrain_dagster.assets import scaling, search
from dtrain_dagster.assets.scaling import ScalingOptions, study_scaling
from dtrain_dagster.assets.search import SearchOptions, search_space
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.resources import GPUClusterResource, build_resources
from dtrain_dagster.settings.environment import Settings
from tests.dtrain_dagster.assets.test_training import plan_in


class Provisioned(Exception):
    """What a study asked for: its cluster, the SKU and the number of nodes."""


def ask(context: Any, manager: Any, cluster: GPUClusterResource, project: Any, sku: str, nodes: int) -> None:
    raise Provisioned(cluster.gpu_type, cluster.first_tier, cluster.node_count, sku, nodes)


def of_scaling(context: Any, resources: dict[str, Any], plan: Any) -> None:
    study_scaling(context, ScalingOptions(), resources["cluster"], resources["project"], {"train": 9}, plan)


def of_search(context: Any, resources: dict[str, Any], plan: Any) -> None:
    config = SearchOptions(space={"training.seed": [1, 2]})
    samples = {"train": 900, "valid": 90, "test": 90}
    dataset = BuiltDataset(uri="", dataset_id="cd", rows=0, samples=samples, excluded={}, built=False)
    search_space(context, config, resources["cluster"], resources["project"], dataset, plan)


@pytest.mark.parametrize(
    ("module", "study", "first"),
    [(scaling, of_scaling, 2), (search, of_search, 1)],  # a trial begins on one node
)
def test_a_study_is_run_on_the_nodes_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, study: Callable[..., None], first: int
) -> None:
    """Which are what it is priced by, whatever the environment has: the launchpad of the plan asked for others."""
    monkeypatch.setattr(module, "provision", ask)
    plan = replace(
        plan_in(Path(write_dataset(tmp_path / "data"))), sku="Standard_NC24ads_A100_v4", tier="spot", node_count=2
    )
    resources = build_resources(Settings(home=tmp_path, nodes=3))
    context = SimpleNamespace(run=SimpleNamespace(run_id="run"), log=logging.getLogger())
    with pytest.raises(Provisioned) as asked:
        study(context, resources, plan)
    assert asked.value.args == ("Standard_NC24ads_A100_v4", "spot", 2, "Standard_NC24ads_A100_v4", first)

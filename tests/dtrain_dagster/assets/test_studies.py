"""The nodes that studies of a plan are run on."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import hardware_mark
from dtrain_dagster.assets.search import SearchOptions, search_space
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.resources import GPUClusterResource, build_resources
from dtrain_dagster.settings.environment import Settings
from harness.small_job import write_dataset
from tests.dtrain_dagster.assets.test_training import plan_in


class Provisioned(Exception):
    """What a study asked for: its cluster, the SKU and the number of nodes."""


def ask(run: ClusterRun, sku: str, nodes: int) -> None:
    raise Provisioned(run.cluster.gpu_type, run.cluster.first_tier, run.cluster.node_count, sku, nodes)


def of_search(context: Any, resources: dict[str, Any], plan: Any) -> None:
    config = SearchOptions(space={"training.seed": [1, 2]})
    samples = {"train": 900, "valid": 90, "test": 90}
    dataset = BuiltDataset(uri="", dataset_id="cd", rows=0, samples=samples, excluded={}, built=False)
    search_space(context, config, resources["cluster"], resources["project"], dataset, plan)


def test_a_study_is_run_on_the_nodes_of_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are what it is priced by, whatever the environment has: the launchpad of the plan asked for others."""
    monkeypatch.setattr(ClusterRun, "provision", ask)
    plan = replace(
        plan_in(Path(write_dataset(tmp_path / "data"))), sku="Standard_NC24ads_A100_v4", tier="spot", node_count=2
    )
    resources = build_resources(Settings(home=tmp_path, nodes=3))
    context = SimpleNamespace(run=SimpleNamespace(run_id="run"), log=logging.getLogger())
    with pytest.raises(Provisioned) as asked:
        of_search(context, resources, plan)
    assert asked.value.args == ("Standard_NC24ads_A100_v4", "spot", 2, "Standard_NC24ads_A100_v4", 1), "a trial's node"


def test_a_measurement_is_named_after_the_hardware_that_it_was_made_on(tmp_path: Path) -> None:
    cluster = build_resources(Settings(home=tmp_path))["cluster"]
    assert isinstance(cluster, GPUClusterResource)
    assert hardware_mark(cluster, "Standard_NC6s_v3") == "", "local nodes are this machine, whatever stands in"
    cloud = cluster.model_copy(update={"kind": "azure_ml"})
    marks = [hardware_mark(cloud, sku) for sku in ("Standard_NC6s_v3", "Standard_NC4as_T4_v3")]
    assert marks == ["-nc6sv3", "-nc4ast4v3"]

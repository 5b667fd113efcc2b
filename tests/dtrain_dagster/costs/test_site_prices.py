"""A site's price per node-hour of a partition: one figure in plan, choices, budget and bill, told as the site's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain_dagster.assets.common import hardware_mark
from dtrain_dagster.costs.plan import node_seconds_of
from dtrain_dagster.costs.prices import (
    LISTED,
    OF_SITE,
    STAND_IN,
    PriceError,
    hardware_of,
    price_of,
    price_words,
)
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.resources import GPUClusterResource, build_resources
from dtrain_dagster.settings.cluster_kinds import TIERS
from dtrain_dagster.settings.environment import SettingsError, load_settings
from trainer.documents.places import checked_id

GPU = "Standard_NC6s_v3@gpu"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "site.json"
    path.write_text('{"gpu": 2.5, "gpu,long": 1.25}')
    given = {"HOME": str(tmp_path), "CLUSTER": "slurm", "SLURM_OPTIONS": f"prices={path}", "SLURM_PARTITION": "gpu"}
    for name, value in given.items():
        monkeypatch.setenv(f"DTRAIN_{name}", value)
    return path


def cluster() -> GPUClusterResource:
    return build_resources(load_settings())["cluster"]


def test_nodes_of_a_partition_cost_what_the_site_says_on_any_tier(table: Path):
    price = price_of(cluster().sku)
    assert price.sku == GPU
    assert {price.usd_per_hour(tier) for tier in TIERS} == {2.5}
    listed = hardware_of("Standard_NC6s_v3")
    assert (price.gpu, price.speed, price.memory_gib) == (listed.gpu, listed.speed, listed.memory_gib)
    assert price_words(GPU, is_bought=False) == OF_SITE
    assert price_words("Standard_NC6s_v3", is_bought=False) == STAND_IN
    assert price_words("Standard_NC6s_v3", is_bought=True) == LISTED


def test_the_bill_and_a_budget_in_dollars_are_in_the_sites(table: Path):
    usage = [NodeUsage(node_id=node, sku=GPU, started_at=0.0, ended_at=1800.0) for node in range(2)]
    assert CostTracker("", usage, "dedicated").total_usd == pytest.approx(2.5)
    assert node_seconds_of(5.0, usage, GPU, "dedicated") == pytest.approx(3600 + 3600)


def test_a_change_of_the_file_counts_at_once(table: Path):
    assert price_of(GPU).usd_per_hour("dedicated") == 2.5
    table.write_text('{"gpu": 3}')
    os.utime(table, (1764000000, 1764000000))
    assert price_of(GPU).usd_per_hour("dedicated") == 3.0
    assert price_of(GPU).figure("dedicated").recorded_on == "2025-11-24"


def test_a_partition_without_a_price_is_refused_before_anything_runs(table: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_SLURM_PARTITION", "cpu")
    with pytest.raises(SettingsError, match="has no price of partition 'cpu', only of gpu, gpu,long: add it there"):
        cluster()
    table.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        cluster()
    monkeypatch.delenv("DTRAIN_SLURM_OPTIONS")
    assert cluster().sku == "Standard_NC6s_v3"
    with pytest.raises(PriceError, match="set prices in DTRAIN_SLURM_OPTIONS to the site's table"):
        price_of(GPU)
    assert hardware_of(GPU).sku == GPU, "its hardware is known still"


def test_without_a_partition_or_elsewhere_the_list_price_stands_in(table: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DTRAIN_SLURM_PARTITION")
    assert cluster().sku == "Standard_NC6s_v3"
    monkeypatch.setenv("DTRAIN_CLUSTER", "local")
    assert cluster().sku == "Standard_NC6s_v3"


def test_short_runs_on_partitions_have_names_of_their_own(table: Path, monkeypatch: pytest.MonkeyPatch):
    marks = set()
    for partition in ("gpu", "gpu,long"):
        monkeypatch.setenv("DTRAIN_SLURM_PARTITION", partition)
        mark = hardware_mark(cluster(), cluster().sku)
        checked_id(f"probe{mark}", "a job")
        marks.add(mark)
    assert marks == {"-nc6sv3-gpu", "-nc6sv3-gpu-long"}

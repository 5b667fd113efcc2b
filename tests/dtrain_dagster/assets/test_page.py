"""The order of a page, its tables and its links; and the nodes that a launchpad asks for."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from dtrain_dagster.assets.common import MOST_ROWS, best_rows, head_of_page, links, sentences, with_rest
from dtrain_dagster.assets.plan_options import NodeTier, TrainingOptions, job_config, with_nodes_of_run
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.resources import GPUClusterResource
from trainer.config import ConfigError


def test_a_page_begins_with_the_verdict_the_picture_and_the_figures_that_are_known() -> None:
    head = head_of_page("It is good.", "![a](data:x)", {"cost_usd": 1.5, "score": None})
    assert list(head) == ["verdict", "picture", "cost_usd"]
    assert list(head_of_page("It is good.", "", {})) == ["verdict"]


def test_a_long_table_keeps_its_sum_and_its_first_columns() -> None:
    rows = [{"node": f"node {number}", "usd": 0.5, "sku": "a"} for number in range(25)]
    shown = with_rest(rows, "node", ("usd",))
    assert len(shown) == MOST_ROWS
    assert shown[-1] == {"node": "16 others", "usd": 8.0, "sku": ""}
    assert sum(row["usd"] for row in shown) == 12.5
    assert with_rest(rows[:3], "node", ("usd",)) == rows[:3]
    table = best_rows(rows, ("node", "usd"))
    assert [column.name for column in table.schema.columns] == ["node", "usd"]
    assert len(table.records) == MOST_ROWS


def test_links_are_pages_of_the_web_only() -> None:
    found = links(dashboard="http://127.0.0.1:8060/#a", studio="javascript:alert(1)", nothing="")
    assert {name: value.url for name, value in found.items()} == {"dashboard": "http://127.0.0.1:8060/#a"}


def test_an_address_that_would_make_the_page_too_wide_is_behind_its_name() -> None:
    run = f"http://127.0.0.1:5000/#/runs/{'ab' * 16}"
    found = links(run_page=run, dashboard="http://127.0.0.1:8060/jobs/one")
    assert found["run_page"].value == f"[run page](<{run}>)"
    assert found["dashboard"] == dg.MetadataValue.url("http://127.0.0.1:8060/jobs/one")
    hostile = f"http://127.0.0.1/{'a' * 60}>) [x](javascript:alert(1))"
    assert links(run_page=hostile)["run_page"] == dg.MetadataValue.url(hostile), "as Dagster shows any address"


def test_reasons_are_a_list_that_is_read_in_place() -> None:
    assert sentences([]).value == "none"
    assert sentences(["one <b>", "two"]).value == "- one &#60;b&#62;\n- two"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> GPUClusterResource:
    monkeypatch.setenv("DTRAIN_NODES", "3")
    resource = (build_defs().resources or {})["cluster"]
    assert isinstance(resource, GPUClusterResource)
    return resource


def test_the_launchpad_may_ask_for_other_nodes_than_the_environment(cluster: GPUClusterResource) -> None:
    asked = TrainingOptions(nodes=2, gpu_type="Standard_NC24ads_A100_v4", tier=NodeTier.spot)
    other = with_nodes_of_run(cluster, asked)
    assert (other.node_count, other.sku, other.first_tier) == (2, "Standard_NC24ads_A100_v4", "spot")
    same = with_nodes_of_run(cluster, TrainingOptions())
    assert (same.node_count, same.sku, same.first_tier) == (3, cluster.sku, cluster.first_tier)
    azure = GPUClusterResource(
        **{name: getattr(cluster, name) for name in GPUClusterResource.model_fields}
        | {"kind": "azure_ml", "azure": {"tiers": ["dedicated"], "chain": ["a"]}}
    )
    assert with_nodes_of_run(azure, asked).azure == {"tiers": ["spot"], "chain": ["a"]}


def test_nodes_that_there_cannot_be_are_refused_in_one_line() -> None:
    with pytest.raises(dg.Failure) as refused:
        TrainingOptions(nodes=0)
    assert str(refused.value.description).count("\n") == 0
    assert "nodes" in str(refused.value.description)
    assert refused.value.allow_retries is False


def test_bounds_are_told_once_also_of_inherited_fields() -> None:
    for name, bounds in (("budget_usd", "(at least 0)."), ("nodes", "(at least 1, at most 256).")):
        description = TrainingOptions.model_fields[name].description or ""
        assert description.endswith(f" {bounds}"), description
        assert description.count("at least") == 1


def test_an_unknown_field_of_the_launchpad_is_named(tmp_path: Path) -> None:
    fields = {"job_id": "plan", "run_dir": str(tmp_path), "dataset": {"uri": str(tmp_path)}}
    with pytest.raises(
        ConfigError, match=r"launchpad: training.epoch is not a setting: did you mean training.epochs\?"
    ):
        job_config({"training": {"epoch": 3}}, **fields)

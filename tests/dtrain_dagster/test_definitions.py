"""The code location: what is in it, that it loads cheaply, and that both ways of loading it agree."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import dagster as dg
import pytest
import yaml

from dtrain_dagster.data import sharding
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.sensors.retraining import build_weekly_schedule
from dtrain_dagster.settings.environment import Settings

ROOT = Path(__file__).parents[2]


@cache
def location() -> dg.Definitions:
    return build_defs(Settings())


def test_lineage_reads_like_the_product():
    graph = location().resolve_asset_graph()
    parents = {
        node.key.to_user_string(): {parent.to_user_string() for parent in node.parent_keys}
        for node in graph.asset_nodes
    }
    assert parents == {
        "stock_prices": set(),
        "sharded_dataset": {"stock_prices"},
        "cost_estimate": {"sharded_dataset"},
        "gpu_cluster": set(),
        "trained_checkpoint": {"cost_estimate", "gpu_cluster"},
        "registered_model": {"sharded_dataset", "cost_estimate", "trained_checkpoint"},
        "cost_breakdown": {"cost_estimate", "trained_checkpoint"},
        "performance_report": {"cost_estimate", "trained_checkpoint"},
        "hyperparameter_search": {"cost_estimate", "sharded_dataset"},
    }
    for node in graph.asset_nodes:
        assert node.group_name != "default"
        assert node.description
        assert node.owners
        assert node.kinds
        assert node.is_external or node.code_version


def test_what_would_be_wrong_to_train_on_blocks():
    graph = location().resolve_asset_graph()
    blocking = {key.name for key in graph.asset_check_keys if graph.get_check_spec(key).blocking}
    assert {
        "shuffled_labels_teach_nothing",
        "planted_leak_is_caught",
        "weights_equal_on_all_ranks",
        "promotion_gate",
        "serving_endpoint_answers",
    } <= blocking


def test_the_launchpad_checks_the_names_of_models_and_losses(monkeypatch: pytest.MonkeyPatch):
    """As it is typed, before a run begins. A deployment that allows factories of its own has free text."""

    def refused(model: str) -> bool:
        config = {"ops": {"cost_estimate": {"config": {"model": model, "loss": "student_t"}}}}
        try:
            dg.validate_run_config(build_defs(Settings()).resolve_job_def("train"), config)
        except dg.DagsterInvalidConfigError as error:
            return "model not in enum type" in str(error)
        return False

    assert refused("tcm")
    assert not refused("mlp")
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "mine")
    assert not refused("mine.models:build_model")


def test_assets_are_out_of_date_when_the_code_that_makes_them_changes(monkeypatch: pytest.MonkeyPatch):
    """Dagster compares code versions. Those of data are in their ids, so the same code gives the same dataset."""

    def versions() -> dict[str, str | None]:
        graph = build_defs(Settings()).resolve_asset_graph()
        return {key.to_user_string(): graph.get(key).code_version for key in graph.materializable_asset_keys}

    before = versions()
    monkeypatch.setattr(sharding, "CODE_VERSION", sharding.CODE_VERSION + 1)
    after = versions()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"sharded_dataset"}
    monkeypatch.setattr("dtrain_dagster.assets.pipeline.code_version", lambda: "of another trainer")
    changed = {name for name, version in versions().items() if version != after[name]}
    assert {"trained_checkpoint", "cost_estimate", "registered_model"} <= changed
    assert "stock_prices" not in changed


def loaded(program: str, first: str = "sys") -> set[str]:
    """Modules that a program imports beyond those of ``first``, in a process of its own."""
    code = f"import json, sys, {first}; before = set(sys.modules); {program}; "
    code += "print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_others(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} - {"dtrain_dagster", "trainer"} - sys.stdlib_module_names


def test_loading_the_code_location_costs_little_more_than_importing_dagster():
    """A Dagster process does it at each start. What it may need beyond Dagster is named, and how much of it is bounded:
    a heavy module that slips in shows in both, and so do parts of our own that only the body of an asset needs. No
    package counts among our own: its `__init__` says what belongs there, and nothing more."""
    found = loaded("import dtrain_dagster.definitions", first="dagster")
    assert of_others(found) <= {"dagster", "pydantic", "pydantic_settings", "dotenv"}
    own = {name for name in found if name.startswith(("dtrain_dagster", "trainer"))}
    assert len(found - own) <= 45
    assert len([name for name in own if not ROOT.joinpath(*name.split(".")).is_dir()]) <= 160  # modules, not packages
    bodies = ["dtrain_dagster.dashboard"]
    bodies += ["dtrain_dagster.reports.performance"]
    bodies += ["dtrain_dagster.monitoring.strategies"]
    bodies += [f"dtrain_dagster.planning.{name}" for name in ("optimizer", "tuned_settings")]
    assert all(importlib.util.find_spec(name) for name in bodies), "a name that nothing has would never be found"
    assert not [name for name in own if name.startswith(tuple(bodies))]


def test_what_starts_nodes_and_what_only_answers_import_next_to_nothing():
    """The supervisor of a job, and `dtrain --help`."""
    assert of_others(loaded("import dtrain_dagster.clusters.supervise")) <= {"psutil"}
    help_only = "from dtrain_dagster.cli.main import main; main(['--help'], standalone_mode=False)"
    assert of_others(loaded(help_only)) == {"click"}


def test_workspace_and_module_are_the_same_location():
    workspace = yaml.safe_load((ROOT / "workspace.yaml").read_text())
    [entry] = workspace["load_from"]
    assert entry["python_module"]["module_name"] == "dtrain_dagster.definitions"
    assert entry["python_module"]["location_name"] == "dtrain"
    assert entry["python_module"]["working_directory"] == "."


def test_a_bad_cron_string_is_refused():
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="weekly_retraining"):
        build_weekly_schedule(Settings(), cron="every Saturday is too late")

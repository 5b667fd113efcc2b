"""Ceilings in front of the emulated workspace: what is bought counts, and not what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.costs.prices import price_of
from harness.small_job import write_dataset
from tests.azure.shell import JOBS, Shell
from trainer.storage.open import open_storage

A100, H100 = "Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5"


def test_nodes_that_are_dearer_than_those_asked_for_are_refused_before_the_job(shell: Shell, tmp_path: Path) -> None:
    write_dataset(tmp_path / "home" / "storage" / "datasets" / "walks")
    words = ["train", "--dataset", "latest", "--nodes", "2", "--model", "my_model:make", "--name", "first"]
    words += ["--set", "training.max_steps=4"]
    assert CliRunner().invoke(main, ["cost", "ceilings", "--per-hour", "10", "--per-month", "50"]).exit_code == 0
    shell.cloud.control("fault", fault="refuse", vm_size=A100, how="sync", count=None)
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2, refused.output
    assert f"{A100} was not available: using {H100}" in refused.stderr
    assert (
        "the ceiling of $10.00 per hour: running jobs cost $0.00 an hour, and this start adds $13.96" in refused.stderr
    )
    assert shell.cloud.control("bought")["jobs"] == {}
    assert open_storage(JOBS).list() == []

    shell.cloud.control("clear")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    bill = json.loads(CliRunner().invoke(main, ["cost", "first", "--json"]).stdout)
    document = json.loads(CliRunner().invoke(main, ["cost", "ceilings", "--json"]).stdout)
    spent = {stand["ceiling"]: stand["spent_usd"] for stand in document["stands"]}
    assert spent["per_month"] == pytest.approx(bill["metrics"]["total_cost_usd"])
    assert 0 < spent["per_month"] < price_of(H100).usd_per_hour("dedicated")
    assert spent["per_hour"] == 0, "it has ended"

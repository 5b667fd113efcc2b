"""`dtrain train --dry-run` in front of the emulated workspace: what is printed is what the service then gets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.azure_ml import jobs, provision
from dtrain_dagster.clusters.azure_ml.preview import entity_text
from harness.azure.emulator.around import SUBNET_ID
from harness.small_job import write_dataset
from tests.azure.shell import JOBS, Shell
from trainer.storage.open import open_storage

WORDS = ("train", "--dataset", "latest", "--nodes", "2", "--model", "my_model:make", "--name", "first")


def test_the_compute_and_the_job_are_shown_as_the_service_gets_them(shell: Shell, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("DTRAIN_AZURE_SUBNET", SUBNET_ID)
    write_dataset(tmp_path / "home" / "storage" / "datasets" / "walks")
    words = (*WORDS, "--set", "training.max_steps=4")
    dry = CliRunner().invoke(main, [*words, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "price: 2 nodes of Standard_NC24ads_A100_v4 (dedicated) at $3.67 are $7.35 per hour" in dry.stderr
    assert "would be copied to az://dtrain/team/datasets/" in dry.stderr
    assert "ok: storage: az://dtrain/team: not tried, since that writes" in dry.stderr
    bought = shell.cloud.control("bought")
    assert (bought["computes"], bought["jobs"]) == ({}, {})
    for folder in (JOBS, "az://dtrain/team/datasets", "az://dtrain/team/launch-secrets", "az://dtrain/team/doctor"):
        assert open_storage(folder).list() == [], folder
    assert not (tmp_path / "home" / "orders").exists()
    compute, job = yaml.safe_load_all(dry.stdout)
    assert (compute["size"], compute["min_instances"], compute["max_instances"]) == ("Standard_NC24ads_A100_v4", 0, 2)
    assert job["compute"] == f"azureml:{compute['name']}"
    assert "#   my_model.py\n" in dry.stdout

    sent: list[str] = []
    described, made = jobs.Jobs._describe, provision.describe_compute

    def describe(self: Any, record: Any, folder: str) -> Any:
        found = described(self, record, folder)
        sent.append(entity_text(found))
        return found

    def describe_compute(*given: Any) -> Any:
        found = made(*given)
        sent.append(entity_text(found))
        return found

    monkeypatch.setattr(jobs.Jobs, "_describe", describe)
    monkeypatch.setattr(provision, "describe_compute", describe_compute)
    real = CliRunner().invoke(main, words)
    assert real.exit_code == 0, real.output
    printed = re.sub(r"^#.*\n", "", dry.stdout, flags=re.MULTILINE)
    assert [yaml.safe_load(text) for text in sent] == list(yaml.safe_load_all(printed))
    refused = CliRunner().invoke(main, [*WORDS[:-1], "second", "--dry-run"], env={"DTRAIN_AZURE_SUBNET": ""})
    assert refused.exit_code == 2
    assert "missing: network: no subnet is named" in refused.stderr
    assert "set DTRAIN_AZURE_SUBNET" in refused.stderr, "with the remedy"
    [name] = shell.cloud.control("bought")["computes"]
    assert name == compute["name"]

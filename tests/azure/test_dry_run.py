"""`dtrain train --dry-run` in front of the emulated workspace: what is printed is what the service then gets.

And ceilings: what is bought counts, and not what was asked for.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.azure_ml import jobs, provision
from dtrain_dagster.clusters.azure_ml.provision import entity_text
from dtrain_dagster.planning import check_job
from dtrain_dagster.support.user_code import stage_for_nodes
from harness.azure.emulator.around import SUBNET_ID
from harness.small_job import write_dataset
from tests.azure.shell import JOBS, Shell
from trainer.performance.memory import ModelBytes
from trainer.storage.open import open_storage

WORDS = ("train", "--dataset", "latest", "--nodes", "2", "--model", "my_model:make", "--name", "first")
A100, H100 = "Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5"


def test_the_compute_and_the_job_are_shown_as_the_service_gets_them(shell: Shell, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("DTRAIN_AZURE_OPTIONS", f"subnet={SUBNET_ID}")
    monkeypatch.setenv("DTRAIN_OPTIONS", "command_tracking=off")

    def stage_without_trainer(folder: Path, *of_the_job: Any) -> list[str]:
        files = stage_for_nodes(folder, *of_the_job)
        shutil.rmtree(folder / "trainer")  # hundreds of files, which nothing runs here
        return files

    monkeypatch.setattr(jobs, "stage_for_nodes", stage_without_trainer)
    model = ModelBytes(parameters=4000, trained=4000)
    monkeypatch.setattr(check_job, "rehearse", lambda *_: model)  # in a process of its own, which loads torch
    write_dataset(tmp_path / "home" / "storage" / "datasets" / "walks")
    words = (*WORDS, "--set", "training.max_steps=4")
    dry = CliRunner().invoke(main, [*words, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert f"price: 2 nodes of {A100} (dedicated) at $3.67 are $7.35 per hour" in dry.stderr
    assert "would be copied to az://dtrain/team/datasets/" in dry.stderr
    assert "ok: storage: az://dtrain/team: not tried, since that writes" in dry.stderr
    bought = shell.cloud.control("bought")
    assert (bought["computes"], bought["jobs"]) == ({}, {})
    for folder in (JOBS, "az://dtrain/team/datasets", "az://dtrain/team/launch-secrets", "az://dtrain/team/doctor"):
        assert open_storage(folder).list() == [], folder
    assert not (tmp_path / "home" / "orders").exists()
    compute, job = yaml.safe_load_all(dry.stdout)
    assert (compute["size"], compute["min_instances"], compute["max_instances"]) == (A100, 0, 2)
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
    shell.cloud.control("fault", fault="queue", job="first-l1")  # its nodes would train, which costs time
    real = CliRunner().invoke(main, [*words, "--detach"])
    assert real.exit_code == 0, real.output
    assert CliRunner().invoke(main, ["cancel", "first"]).exit_code == 0
    printed = re.sub(r"^#.*\n", "", dry.stdout, flags=re.MULTILINE)
    assert [yaml.safe_load(text) for text in sent] == list(yaml.safe_load_all(printed))
    refused = CliRunner().invoke(main, [*WORDS[:-1], "second", "--dry-run"], env={"DTRAIN_AZURE_OPTIONS": ""})
    assert refused.exit_code == 2
    assert "missing: network: no subnet is named" in refused.stderr
    assert "set subnet in DTRAIN_AZURE_OPTIONS" in refused.stderr, "with the remedy"
    assert list(shell.cloud.control("state")["computes"]) == [compute["name"]]
    dearer_nodes_are_refused_before_the_job(shell)


def dearer_nodes_are_refused_before_the_job(shell: Shell) -> None:
    assert CliRunner().invoke(main, ["cost", "ceilings", "--per-month", "10"]).exit_code == 0
    shell.cloud.control("fault", fault="refuse", vm_size=A100, how="sync", count=None)
    refused = CliRunner().invoke(main, [*WORDS[:-1], "third"], env={"DTRAIN_CLUSTER_NAME": "other"})
    assert refused.exit_code == 2, refused.output
    assert f"{A100} was not available: using {H100}" in refused.stderr
    assert "the ceiling of $10.00 per month: $" in refused.stderr
    assert "and this start adds $13.96" in refused.stderr
    assert list(shell.cloud.control("state")["jobs"]) == ["first-l1"]
    assert "third" not in str(open_storage(JOBS).list())

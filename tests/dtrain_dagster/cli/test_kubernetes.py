from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dtrain_dagster.cli.main import main

JOB = {"job_id": "one", "run_dir": "/data/jobs/one", "dataset": {"uri": "/data/datasets/a"}}


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_KUBERNETES_IMAGE", "registry.example/dtrain:1")


@pytest.mark.usefixtures("image")
def test_a_job_is_printed_as_what_kubeflow_applies(tmp_path: Path):
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    done = CliRunner().invoke(main, ["kubernetes", "train-job", str(tmp_path / "job.json"), "--nodes", "5"])
    assert done.exit_code == 0, done.output
    runtime, job = yaml.safe_load_all(done.output)
    assert (runtime["kind"], job["kind"], job["spec"]["trainer"]["numNodes"]) == ("TrainingRuntime", "TrainJob", 5)


@pytest.mark.usefixtures("image")
def test_a_job_that_cannot_be_read_is_refused(tmp_path: Path):
    (tmp_path / "job.json").write_text("{}")
    done = CliRunner().invoke(main, ["kubernetes", "train-job", str(tmp_path / "job.json")])
    assert done.exit_code != 0
    assert "job_id" in done.output


@pytest.mark.parametrize("command", [["check"], ["train-job", "job.json"]])
def test_settings_come_first(command: list[str]):
    done = CliRunner().invoke(main, ["kubernetes", *command])
    assert done.exit_code != 0
    assert "DTRAIN_KUBERNETES_IMAGE" in done.output


@pytest.mark.usefixtures("image")
def test_a_check_without_a_cluster_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DTRAIN_KUBERNETES_KUBECONFIG", str(tmp_path / "absent"))
    done = CliRunner().invoke(main, ["kubernetes", "check"])
    assert done.exit_code != 0
    assert "set DTRAIN_KUBERNETES_KUBECONFIG" in done.output

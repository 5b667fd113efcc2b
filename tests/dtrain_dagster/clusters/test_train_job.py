from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dtrain_dagster.cli.main import main as dtrain
from dtrain_dagster.clusters.kubernetes.train_job import main

JOB = {"job_id": "one", "run_dir": "/data/jobs/one", "dataset": {"uri": "/data/datasets/a"}}


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_KUBERNETES_IMAGE", "registry.example/dtrain:1")


@pytest.mark.usefixtures("image")
def test_a_job_is_printed_as_what_kubeflow_applies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    main([str(tmp_path / "job.json"), "--nodes", "5"])
    runtime, job = yaml.safe_load_all(capsys.readouterr().out)
    assert (runtime["kind"], job["kind"], job["spec"]["trainer"]["numNodes"]) == ("TrainingRuntime", "TrainJob", 5)


@pytest.mark.parametrize(("is_set", "said"), [(True, "job_id"), (False, "DTRAIN_KUBERNETES_IMAGE")])
def test_a_job_or_a_setting_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_set: bool, said: str
):
    if is_set:
        monkeypatch.setenv("DTRAIN_KUBERNETES_IMAGE", "registry.example/dtrain:1")
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "job.json")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("image")
def test_a_check_without_a_cluster_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DTRAIN_CLUSTER", "kubernetes")
    monkeypatch.setenv("DTRAIN_KUBERNETES_KUBECONFIG", str(tmp_path / "absent"))
    done = CliRunner().invoke(dtrain, ["doctor"])
    assert done.exit_code == 2
    assert "set DTRAIN_KUBERNETES_KUBECONFIG" in done.output

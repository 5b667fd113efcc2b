"""A model of rows becomes a version in the registry, and answers from there as it did in the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dtrain_dagster import registry
from dtrain_dagster.registry.run_model import RunModelError
from dtrain_dagster.registry.smoke_test import load_sample
from tests.kinds import build_table, build_texts
from tests.tables import copy_tables
from trainer.config import parse_job
from trainer.data.row_data import RowData
from trainer.engine.run_job import run_job
from trainer.rundir import RunDir


def trained(folder: Path, uri: str, model: str, loss: str) -> str:
    run_dir = RunDir(str(folder / "run"))
    run_dir.make()
    document = {
        "job_id": "rows", "run_dir": run_dir.uri, "dataset": {"uri": uri}, "tracking": {"tensorboard": False},
        "model": {"factory": model}, "loss": {"factory": loss},
        "training": {"world_size": 1, "batch_size_per_gpu": 64, "gradient_accumulation_steps": 1, "epochs": 1},
    }  # fmt: skip
    job = parse_job(json.dumps(document))
    run_dir.write_job(job)
    assert run_job(job) == 0
    return run_dir.uri


@pytest.mark.slow
def test_a_registered_model_of_rows_answers_as_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    made = build_table(tmp_path)
    run = trained(tmp_path, made.uri, "mlp", "logistic")
    copy_tables(tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    version = registry.register_model(run, uri, "tumours", {}, "# card", cache_dir=str(tmp_path / "cache"))
    assert version.created
    sample = load_sample(run, str(tmp_path / "cache"))
    assert set(sample.expected) == {"prediction", "probability_0", "probability_1"}
    assert np.array_equal(sample.trained["prediction"], sample.expected["prediction"])
    mlflow.set_tracking_uri(uri)
    loaded = mlflow.pyfunc.load_model(version.uri)
    rows, _ = RowData(made.uri, tmp_path / "cache").gather("test", np.arange(5))
    found = loaded.predict(rows.numpy())
    assert np.allclose(found["probability_0"] + found["probability_1"], 1)
    assert loaded.metadata.metadata["categories"] == {"colour": ["blue", "green", "red"]}
    assert loaded.metadata.metadata["classes"] == ["no", "yes"]


def test_models_of_tokens_are_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    run = trained(tmp_path, build_texts(tmp_path).uri, "gpt", "cross_entropy")
    with pytest.raises(
        RunModelError, match="models of tokens, and of datasets of your own, are neither registered nor"
    ):
        registry.register_model(run, f"sqlite:///{tmp_path}/mlflow.db", "words", {}, "# card")

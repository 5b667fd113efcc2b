"""Jobs on each kind of dataset are checked before any node is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.planning.check_job import check_job, check_memory, data_of, room_of_sku
from tests.kinds import build_table
from trainer.config import ConfigError, JobConfig, OptimizerConfig, parse_job

OWN = """
import torch
from torch.utils.data import TensorDataset

def make_datasets(count=300, lame=False):
    if lame:
        raise ValueError("the disk is empty")
    return TensorDataset(torch.arange(count).float()[:, None], torch.arange(count).float())

def make_own(outputs=1):
    return torch.nn.Sequential(torch.nn.Linear(1, outputs), torch.nn.Flatten(0))

def make_model(spec, outputs, width=4):
    return torch.nn.Sequential(torch.nn.Linear(spec.inputs, width), torch.nn.Linear(width, outputs))
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_checked.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "own_checked,torch.nn")


def job_of(uri: str, model: str, loss: str, args: Any = None) -> JobConfig:
    document = {
        "job_id": "checked", "run_dir": "/nowhere", "dataset": {"uri": uri},
        "model": {"factory": model, "args": args or {}}, "loss": {"factory": loss},
        "training": {"world_size": 1, "batch_size_per_gpu": 10, "gradient_accumulation_steps": 1, "epochs": 2},
    }  # fmt: skip
    return parse_job(json.dumps(document))


def test_stock_parts_of_the_kind_pass_and_others_are_refused(tmp_path: Path) -> None:
    rows = build_table(tmp_path)
    assert check_job(job_of(rows.uri, "mlp", "logistic"), ranks=1).sentences == ()
    with pytest.raises(ConfigError, match=r"model.factory = 'tcn' is not for a dataset of"):
        check_job(job_of(rows.uri, "tcn", "cross_entropy"), ranks=1)


@pytest.mark.slow
def test_a_model_is_rehearsed_on_rows_and_counted(tmp_path: Path) -> None:
    """In a process of its own, which counts it, what its optimizer keeps, and measures a sample."""
    rows = build_table(tmp_path)
    sgd = OptimizerConfig(factory="torch.optim:SGD", args={"lr": 0.1, "momentum": 0.9})
    job = replace(job_of(rows.uri, "own_checked:make_model", "logistic"), optimizer=sgd)
    room = room_of_sku(price_of("Standard_NC4as_T4_v3"), 1, 1)
    checked = check_job(job, ranks=1, room=room)
    assert checked.sentences == ()
    model = checked.model
    assert model is not None
    assert model.parameters == model.trained > 4 * 4
    assert model.moments == 1.0
    assert model.block + model.rest <= model.parameters
    assert (model.sample or 0) > 0
    with pytest.raises(ConfigError, match=r"the model does not fit: .* a rank with training\.strategy = 'ddp'"):
        check_memory(checked, job.training, replace(room, bytes=10.0))
    with pytest.raises(ConfigError, match=r"'squared_error' does not fit 'bought', whose task is binary"):
        check_job(job_of(rows.uri, "own_checked:make_model", "squared_error"), ranks=1)


@pytest.mark.long
@pytest.mark.slow
def test_a_dataset_of_ones_own_is_made_once_in_a_process_of_its_own(tmp_path: Path) -> None:
    job = job_of("factory:own_checked:make_datasets", "own_checked:make_own", "squared_error", args={})
    found = data_of(job)
    assert found.model is not None
    assert found.model.parameters == 8
    assert dict(found.samples) == {"train": 300, "valid": 0, "test": 0}
    (tmp_path / "own_checked.py").write_text("broken(")
    assert data_of(job) == found, "it was made before"
    (tmp_path / "own_checked.py").write_text(OWN)
    job.dataset.args = {"lame": True}
    with pytest.raises(ConfigError, match=r"raised ValueError: the disk is empty"):
        data_of(job)
    with pytest.raises(ConfigError, match=r"the module 'elsewhere' is not allowed"):
        data_of(job_of("factory:elsewhere:make", "own_checked:make_model", "squared_error"))
    column = job_of("factory:own_checked:make_datasets", "torch.nn:Linear", "squared_error")
    column.model.args = {"in_features": 1, "out_features": 1}
    with pytest.raises(ConfigError, match=r"the loss compares outputs and targets of different shapes"):
        data_of(column)

"""Jobs train on each kind of dataset, from `job.json` to the report, and refuse parts of another kind."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.small_job import write_dataset
from tests.kinds import build_table
from trainer.config import ConfigError, JobConfig, parse_job
from trainer.data.shards import DataShardManager
from trainer.engine.run_job import run_job
from trainer.exit_codes import DONE, UNUSABLE
from trainer.model.allowed_factories import refuse_foreign
from trainer.model.saved_model import SavedModelError, load_saved_model
from trainer.rundir import RunDir

OWN = """
import torch
from torch.utils.data import TensorDataset

def make_datasets(count=300, lame=False):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=random)
    y = (x.sum(1) > 0).long()
    train, valid = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])
    return 7 if lame else {"train": train, "valid": valid}

def make_model(width=8):
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

class Twice:
    "A task: it knows the structure of its batches."
    def loss(self, model, batch):
        inputs, target = batch
        return 2 * torch.nn.functional.cross_entropy(model(inputs), target, reduction="none")
    def metrics(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float()}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache, and a module of one's own."""
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own_kinds.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "own_kinds")
    return


def job_of(folder: Path, uri: str, model: str, loss: str, args: Any = None, **training: Any) -> JobConfig:
    document = {
        "job_id": "kinds", "run_dir": str(folder / "run"), "dataset": {"uri": uri, "args": args or {}},
        "model": {"factory": model}, "loss": {"factory": loss}, "tracking": {"tensorboard": False},
        "training": {
            "world_size": 1, "batch_size_per_gpu": 32, "gradient_accumulation_steps": 1, "learning_rate": 5e-3,
            "epochs": 3, **training,
        },
    }  # fmt: skip
    RunDir(document["run_dir"]).make()
    return parse_job(json.dumps(document))


def result_of(job: JobConfig) -> tuple[int, dict[str, Any], dict[str, Any]]:
    code = run_job(job)
    rundir = RunDir(job.run_dir)
    return code, rundir.read_json("result.json") or {}, rundir.read_json("evaluation.json") or {}


@pytest.mark.parametrize(
    ("target", "loss", "score"),
    [
        ("value", "squared_error", "rmse"),
        ("bought", "logistic", "log_loss"),
        ("bought", "cross_entropy", "log_loss"),
        ("level", "cross_entropy", "log_loss"),
    ],
)
def test_rows_are_learned_judged_and_saved(tmp_path: Path, target: str, loss: str, score: str) -> None:
    made = build_table(tmp_path, target)
    code, result, report = result_of(job_of(tmp_path, made.uri, "mlp", loss))
    assert (code, result["status"]) == (DONE, "succeeded")
    assert report["model"]["samples"] == made.manifest()["samples"]["test"]
    assert report["model"][score] < 0.7 * report["baselines"]["constant"][score]
    assert report["baselines"]["linear"][score] < 0.7 * report["baselines"]["constant"][score]
    assert report["canaries"]["shuffled_targets"]["passed"]
    for name, row in report["baselines"].items():
        assert (row["model_gain"] > 0) == (report["model"][score] < row[score]), name
        assert (row["model_gain_t"] > 0) == (row["model_gain"] > 0)
    assert report["baselines"]["constant"]["model_gain_t"] > 5
    assert ("calibration" in report) == (target != "value")
    saved = load_saved_model(lambda name: (tmp_path / "run" / "model" / name).read_bytes(), ())
    found = saved.predict([[5.0, -1.0, 2.0], [9.0, -2.0, 0.0]])
    assert len(found["prediction"]) == 2
    if target != "value":
        assert found["probability_0"] + sum(
            found[f"probability_{n}"] for n in range(1, len(found) - 1)
        ) == pytest.approx(1)
    with pytest.raises(ValueError, match="expected"):
        saved.predict([[1.0, 2.0]])
    with pytest.raises(ValueError, match=r"colour is a category: give the code of its value, from 1 to 3"):
        saved.predict([[5.0, -1.0, 9.0]])
    with pytest.raises(ValueError, match=r"x holds a value that is missing"):
        saved.predict([[float("nan"), -1.0, 1.0]])


def test_windows_are_learned_by_return_and_volatility_and_served_as_one_forecast(tmp_path: Path) -> None:
    """The usual model and loss: what is judged and served is the mean of the two forecasts."""
    dataset = write_dataset(tmp_path / "windows")
    job = job_of(tmp_path, str(dataset), "har_tcn", "return_and_volatility", threads_per_rank=1)
    code, result, report = result_of(job)
    assert (code, result["status"]) == (DONE, "succeeded")
    assert report["model"]["nll"] < report["baselines"]["constant"]["nll"]
    assert report["model"]["loss"] > report["model"]["nll"] + 0.1  # how far the volatility was missed counts, too
    saved = load_saved_model(lambda name: (tmp_path / "run" / "model" / name).read_bytes(), ())
    shards = DataShardManager(str(dataset))
    with np.load(tmp_path / "run" / "predictions.npz") as judged:
        windows, _ = shards.gather(judged["row"][:50])
        found = saved.predict(windows.numpy())
        for name in ("mu", "sigma", "nu"):
            np.testing.assert_allclose(found[name], judged[name][:50], rtol=1e-4, atol=1e-6)
    correction = saved.description["correction"]
    assert set(correction) == {"scale_factor", "shape_shift"}  # found on the validation split
    assert correction["scale_factor"] != 1.0
    assert set(found) == {"mu", "sigma", "nu", "q05", "q25", "q50", "q75", "q95"}
    for bad in ({"members": 3.0}, {"scale_factor": "2"}, {"scale_factor": math.inf}, [1.0]):
        files = {
            "model.json": json.dumps({**saved.description, "correction": bad}).encode(),
            "weights.pt": (tmp_path / "run" / "model" / "weights.pt").read_bytes(),
        }
        with pytest.raises(SavedModelError, match="finite numbers for scale_factor, shape_shift"):
            load_saved_model(lambda name, files=files: files[name], ())


@pytest.mark.parametrize("loss", ["cross_entropy", "own_kinds:Twice"])
def test_datasets_of_ones_own_are_learned(tmp_path: Path, loss: str) -> None:
    job = job_of(tmp_path, "factory:own_kinds:make_datasets", "own_kinds:make_model", loss, epochs=10)
    code, result, report = result_of(job)
    assert (code, result["status"]) == (DONE, "succeeded")
    assert result["train_samples"] == 200
    assert report["split"] == "valid", "there is no test split"
    assert report["model"]["loss"] < (1.0 if ":" in loss else 0.5)
    assert ("accuracy" in report["model"]) == (":" in loss)
    with pytest.raises(SavedModelError, match=r"kind 'own', whose models are neither registered nor served"):
        load_saved_model(lambda name: (tmp_path / "run" / "model" / name).read_bytes(), ())


@pytest.mark.parametrize(
    ("uri", "model", "loss", "args", "message"),
    [
        ("rows", "tcn", "logistic", {}, r"model.factory = 'tcn' is not for a dataset of rows: use mlp, linear, or"),
        ("rows", "mlp", "squared_error", {}, r"loss.factory = 'squared_error' does not fit 'bought', whose task is"),
        ("rows", "mlp", "student_t", {}, r"loss.factory = 'student_t' is not for a dataset of rows: use squared_error"),
        ("own", "mlp", "cross_entropy", {}, r"model.factory = 'mlp' is not for a dataset of your own: use your own"),
        ("own", "own_kinds:make_model", "cross_entropy", {"lame": True}, r"returned no training dataset but a int"),
        ("own", "own_kinds:make_model", "cross_entropy", {"size": 3}, r"dataset.args = .* it accepts: count"),
        ("factory:other:make", "own_kinds:make_model", "cross_entropy", {}, r"module 'other' is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, uri: str, model: str, loss: str, args: dict[str, Any], message: str
) -> None:
    where = build_table(tmp_path).uri if uri == "rows" else uri
    where = "factory:own_kinds:make_datasets" if uri == "own" else where
    code, result, _ = result_of(job_of(tmp_path, where, model, loss, args))
    assert code == UNUSABLE
    assert re.search(message, result["error"]), result["error"]


def test_a_dataset_of_tokens_is_refused_with_the_example_that_replaces_it(tmp_path: Path) -> None:
    made = Path(build_table(tmp_path).uri)
    manifest = json.loads((made / "manifest.json").read_text())
    (made / "manifest.json").write_text(json.dumps({**manifest, "kind": "tokens", "schema_version": 1}))
    code, result, _ = result_of(job_of(tmp_path, str(made), "gpt", "cross_entropy"))
    assert code == UNUSABLE
    said = "manifest.json: kind = 'tokens': a language model has become a script of its own, as examples/language_model"
    assert said in result["error"]
    with pytest.raises(ConfigError, match=r"model.factory = 'gpt': a language model has become a script of its own"):
        refuse_foreign("model", "gpt", ())


def test_nodes_with_other_data_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, "factory:own_kinds:make_datasets", "own_kinds:make_model", "cross_entropy")
    job.dataset.dataset_id = "tensordataset-0123456789abcdef"
    code, result, _ = result_of(job)
    assert code == UNUSABLE
    assert "all nodes must get the same samples in the same order" in result["error"]

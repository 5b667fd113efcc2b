"""`Trainer(…, registry=…)` in a process of its own: the model is registered, and loads where its class is not known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from harness.tables import copy_tables
from trainer import Trainer
from trainer.config import ConfigError
from trainer.rundir import RunDir

pytestmark = pytest.mark.slow
CONFIG = {"epochs": 3, "batch_size_per_gpu": 16, "learning_rate": 0.01, "checkpoint_frequency": 10}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Sums(Net):
    def forward(self, inputs: Any) -> Tensor:
        return self.layers(inputs["x"])


class Pairs(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> tuple[dict[str, Tensor], int]:
        return {"x": torch.ones(4)}, place % 3


def data(rows: int, seed: int) -> TensorDataset:
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def test_the_model_is_registered_and_needs_nothing_of_the_script(tmp_path: Path) -> None:
    copy_tables(tmp_path / "mlflow.db")
    tracking = {"mlflow_tracking_uri": f"sqlite:///{tmp_path}/mlflow.db", "tensorboard": False}
    test = data(50, 2)
    trainer = Trainer(
        Net(), CONFIG, loss=nn.CrossEntropyLoss(), tracking=tracking, registry="nets", run_dir=tmp_path / "run"
    )
    result = trainer.fit(data(320, 0), data(60, 1), test)
    assert result.model_version == "nets version 1"
    with torch.no_grad():
        np.save(tmp_path / "expected.npy", result.model.eval()(test.tensors[0]).numpy())
    np.save(tmp_path / "inputs.npy", test.tensors[0].numpy())
    code = (
        "import sys, numpy as np, mlflow\n"
        f"mlflow.set_tracking_uri({tracking['mlflow_tracking_uri']!r})\n"
        "model = mlflow.pyfunc.load_model('models:/nets@challenger')\n"
        f"found = model.predict(np.load({str(tmp_path / 'inputs.npy')!r}))\n"
        f"expected = np.load({str(tmp_path / 'expected.npy')!r})\n"
        "np.testing.assert_allclose(found.to_numpy(), expected, rtol=1e-4, atol=1e-5)\n"
        "assert list(found.columns) == ['prediction_1', 'prediction_2', 'prediction_3']\n"
        "assert model.input_example.shape == (3, 4)\n"
        "[taken] = model.metadata.signature.inputs.inputs\n"
        "assert (str(taken.type), taken.shape) == ('float32', (-1, 4))\n"
        "[version] = mlflow.MlflowClient().search_model_versions(\"name='nets'\")\n"
        "print(version.tags['dataset_id'], version.tags['loss'], version.tags['steps'])\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    job = RunDir(result.run_dir).read_job()
    assert done.stdout.split() == [str(job.dataset.dataset_id), "CrossEntropyLoss", str(result.steps)]


@pytest.mark.parametrize(
    ("model", "train", "more", "message"),
    [
        (Net(), data(64, 0), {"tracking": {}}, "no MLflow is named that could register the model: give tracking="),
        (Sums(), Pairs(), {}, "takes one tensor, and the inputs of these batches are a dict"),
        (Net(), data(64, 0), {"registry": "a/b"}, "tracking.registered_model"),
    ],
)
def test_what_cannot_be_registered_is_refused_before_it_is_trained(
    model: nn.Module, train: Any, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tracking = {"mlflow_tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    options: dict[str, Any] = {"tracking": tracking, "registry": True, "loss": nn.CrossEntropyLoss(), **more}
    with pytest.raises(ConfigError, match=message):
        Trainer(model, CONFIG, run_dir=tmp_path / "run", **options).fit(train)
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_server_that_refuses_is_told_and_the_training_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    def refuse(*_: Any, **__: Any) -> None:
        raise mlflow.exceptions.MlflowException("no more models")

    copy_tables(tmp_path / "mlflow.db")
    monkeypatch.setattr(mlflow.tracking.MlflowClient, "create_model_version", refuse)
    tracking = {"mlflow_tracking_uri": f"sqlite:///{tmp_path}/mlflow.db", "tensorboard": False}
    trainer = Trainer(
        Net(), CONFIG, loss=nn.CrossEntropyLoss(), tracking=tracking, registry=True, run_dir=tmp_path / "run"
    )
    result = trainer.fit(data(64, 0))
    assert result.model_version is None
    assert "the model is not registered: MLflow refused (no more models)" in caplog.text

"""`Trainer(…, registry=…)`: what cannot be registered is refused, or told. A model that was is asked in
`tests/dtrain_dagster/registry/test_script_model.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from harness.tables import copy_tables
from trainer import Trainer
from trainer.config import ConfigError

pytestmark = pytest.mark.slow
CONFIG = {"epochs": 3, "batch_size_per_gpu": 16, "learning_rate": 0.01, "checkpoint_frequency": 10}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(4, 3)

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

"""Models of rows keep the digits of numbers that are large beside their deviation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer.config import ConfigError, FactoryConfig
from trainer.model import rows
from trainer.model.build import build_loss
from trainer.model.rows import RowInputs, SquaredError, linear
from trainer.model.saved_model import SavedModel
from trainer.spec import RowSpec

SPEC = RowSpec(
    dataset_id="d", features=("seconds", "colour"), categories=((), ("blue", "red")), has_missing=(False, False),
    feature_mean=(1.7e9, 0.0), feature_std=(29.0, 1.0), target="y", task="regression", classes=(),
    target_mean=1.7e9, target_std=10.0,
)  # fmt: skip


class Rounding(nn.Module):
    """A loss of one's own that rounds first."""

    outputs = 1

    def __init__(self, spec: RowSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - (target.float() - self.spec.target_mean) / self.spec.target_std) ** 2


class RoundingForecast(SquaredError):
    def point(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0] * self.unit + self.mean


@pytest.mark.parametrize("loss", [Rounding, RoundingForecast])
def test_a_loss_that_rounds_is_refused_only_where_that_matters(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rows.LOSSES, "own", loss)
    with pytest.raises(ConfigError, match=r"'own' computes in single precision.*'y', 1.7e\+09.*return float64"):
        build_loss(FactoryConfig(factory="own"), SPEC)
    build_loss(FactoryConfig(factory="own"), replace(SPEC, target_mean=1000.0))
    build_loss(FactoryConfig(factory="squared_error"), SPEC)


def test_a_saved_model_takes_numbers_as_they_are() -> None:
    model = RowInputs(linear(SPEC, 1), SPEC)
    with torch.no_grad():
        model.model.weight[0, 0] = 1  # type: ignore[index, union-attr]
    saved = SavedModel(model, SquaredError(SPEC), SPEC, {})
    given = np.array([[1.7e9 + step, 1] for step in range(-50, 50)])
    found = saved.predict(given)["prediction"]
    assert found == pytest.approx(1.7e9 + 10 * np.arange(-50, 50) / 29, abs=1e-5, rel=0)
    with pytest.raises(ValueError, match="seconds holds a value that is too far"):
        saved.predict(np.array([[1e300, 1]]))

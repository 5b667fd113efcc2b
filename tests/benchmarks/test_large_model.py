"""The saved result of `benchmarks.large_model` against the formula of a rank's memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.large_model import Model
from trainer.model.sizes import model_bytes
from trainer.performance.memory import rank_bytes

SAVED = Path(__file__).parents[2] / "benchmarks" / "results" / "large_model.json"


def test_the_saved_measurement_of_a_large_model_agrees_with_the_formula() -> None:
    saved = json.loads(SAVED.read_text())
    with torch.device("meta"):
        model = model_bytes(Model(saved["width"], saved["depth"]))
    assert saved["parameters"] == model.parameters // 4, "the benchmark's model of that run"
    assert rank_bytes(model, 1).held == pytest.approx(saved["peak_bytes"]["ddp"], rel=0.01)
    assert rank_bytes(model, saved["ranks"]).held == pytest.approx(saved["peak_bytes"]["fsdp"], rel=0.01)

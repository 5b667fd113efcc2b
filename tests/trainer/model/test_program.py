"""A model becomes a program that says the same without its class; what cannot is refused with the reason."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer.model.program import (
    DESCRIPTION,
    PROGRAM,
    ProgramError,
    describe_program,
    export_program,
    load_program,
    load_saved_program,
)

pytestmark = pytest.mark.slow  # to export one takes seconds in a new process


class Mixed(nn.Module):
    """Parts that behave otherwise while they train, and a buffer that no state dict has."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, outputs)
        )
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs + self.shift)


class Branches(Mixed):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if inputs.sum() > 0 else -super().forward(inputs)


class Sequences(Mixed):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)[:, None, :].expand(-1, 5, -1)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    torch.manual_seed(0)
    model, inputs = Mixed(), torch.randn(3, 4)
    data = export_program(model, inputs)
    described = describe_program(data, b"", inputs.numpy())
    return {PROGRAM: data, DESCRIPTION: json.dumps(described).encode()}


def read(files: dict[str, bytes]) -> Any:
    def get(name: str) -> bytes:
        if name not in files:
            raise FileNotFoundError(2, "No such file", name)
        return files[name]

    return get


@pytest.mark.parametrize("count", [1, 2, 2500])
def test_a_program_says_what_the_model_says_for_any_number_of_samples(files: dict[str, bytes], count: int) -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    inputs = torch.randn(count, 4)
    found = load_saved_program(read(files)).predict(inputs.numpy())
    assert list(found) == ["prediction_1", "prediction_2", "prediction_3"]
    with torch.no_grad():
        np.testing.assert_allclose(np.column_stack([*found.values()]), model(inputs).numpy(), rtol=1e-5, atol=1e-6)


def test_no_sample_gives_no_answer_and_one_output_is_the_prediction(files: dict[str, bytes]) -> None:
    assert load_saved_program(read(files)).predict(np.empty((0, 4), np.float32))["prediction_1"].shape == (0,)
    inputs = torch.randn(2, 4)
    data = export_program(Mixed(1), inputs)
    described = json.dumps(describe_program(data, b"", inputs.numpy())).encode()
    saved = load_saved_program(read({PROGRAM: data, DESCRIPTION: described}))
    assert list(saved.predict(inputs.numpy())) == ["prediction"]


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Branches(), torch.ones(2, 4), "cannot be exported by torch.export .*: write forward without branches"),
        (Sequences(), torch.ones(2, 4), r"this one gives \(2, 5, 3\) for a batch of \(2, 4\)"),
        (Mixed(1001), torch.ones(2, 4), r"K up to 1000, and this one gives \(2, 1001\)"),
        (Mixed(), {"x": torch.ones(2, 4)}, "takes one tensor, and the inputs of these batches are a dict"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_remedy(model: nn.Module, inputs: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        export_program(model, inputs)


def test_another_shape_is_refused_beside_the_right_one(files: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match=r"has shape \(2, 5\); expected \(n, 4\)"):
        load_saved_program(read(files)).predict(np.zeros((2, 5)))


def changed(files: dict[str, bytes], change: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The program with other members: ``change`` gets the name and the content of each."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(files[PROGRAM])) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for item in old.infolist():
            for name, content in change(item.filename, old.read(item)):
                new.writestr(name, content)
    return buffer.getvalue()


def pickled_weight(name: str, content: bytes) -> Any:
    yield name, content.replace(b'"use_pickle": false', b'"use_pickle": true', 1)


def with_object(name: str, content: bytes) -> Any:
    yield name, content
    if name.endswith("model_constants_config.json"):
        yield name.replace("model_constants_config.json", "custom_obj_0"), b"cos\nsystem\n(S'true'\ntR."


@pytest.mark.parametrize(
    ("change", "message"),
    [(pickled_weight, "a tensor of a class of its own"), (with_object, "custom_obj_0, an object that only pickle")],
)
def test_nothing_is_unpickled(files: dict[str, bytes], change: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        load_program(changed(files, change))


def test_a_packed_or_damaged_program_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(ProgramError, match="is compressed"):
        load_program(changed(files, lambda name, content: [(name, content)], zipfile.ZIP_DEFLATED))
    with pytest.raises(ProgramError, match=r"is not a program of torch\.export"):
        load_program(files[PROGRAM][:1000])
    with pytest.raises(ProgramError, match="it is damaged or was changed"):
        load_saved_program(read(files | {PROGRAM: files[PROGRAM] + b" "}))
    with pytest.raises(ProgramError, match=r"program\.pt2 is missing"):
        load_saved_program(read({DESCRIPTION: files[DESCRIPTION]}))

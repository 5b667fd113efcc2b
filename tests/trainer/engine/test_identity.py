"""What a checkpoint belongs to, and what its scores were measured with, notices each change, and nothing else."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.differences import list_differences
from trainer.engine.identity import describe_loss, describe_structure, describe_weights, digest_measure
from trainer.model.task import SupervisedTask

SOURCE = """
import math
from functools import partial
import torch
from torch import nn

SCALE = 1.0
TABLE = {"a": [1, 2], "b": {3, 4}}

def double(x):
    return x * 2

def helped(x):
    return double(x) * SCALE

class Base(nn.Module):
    def scaled(self, x):
        return x + 1

class Net(Base):
    rate = 1
    __slots__ = ("slot",)

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.ReLU())
        self.width, self._private, self.seen, self.slot, self.scale = width, 3, 0, 5, math.nan
        self.register_buffer("running", torch.zeros(2))

    def forward(self, x):
        self.seen += 1  # a comment
        self.running += 1
        def inner(y):
            return y - 1
        return self.scaled(helped(inner(self.layers(x)))) * self.width * TABLE["a"][0]

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(3))
        self.step = None

    def forward(self, outputs, target):
        self.step = 1
        return ((outputs - target) ** 2).mean(1)

def weighed(outputs, target, factor, *, power=2.0):
    return factor * (outputs - target).abs().mean(1) ** power

def make_loss(factor):
    return lambda outputs, target: factor * (outputs - target).abs().mean(1)

def collate(samples):
    return torch.stack(samples) * 1.0

model, loss, valid = Net(1.0), Loss(), "points"
"""
MADE = '"points"'  # what follows it happens to the parts after they were made
NUMBERS = itertools.count()


def describe(folder: Path, source: str) -> dict[str, Any]:
    """What describes the parts that this source defines, run a little before."""
    path = folder / f"parts_{next(NUMBERS)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # where `inspect` finds the source of classes
    torch.manual_seed(0)
    spec.loader.exec_module(made)
    task = SupervisedTask(made.loss)
    found = {
        "structure": describe_structure(made.model),
        "weights": describe_weights(made.model),
        "loss": describe_loss(task),
        "measure": digest_measure(made.model, task, made.valid, made.collate),
    }
    return dict(list_differences({}, found))


CODE, VALUE, LOSS, VALID = (
    "measure.the model's code",
    "measure.a value that the model holds",
    "measure.the loss",
    "measure.the validation samples",
)
MODEL_OF_FUNCTIONS = "loss = partial(weighed, factor=3.0)"
CHANGES: dict[str, tuple[str, str, set[str]]] = {
    "a comment": ("  # a comment", "", set()),
    "a function that the model calls": ("return x * 2", "return x * 3", {CODE}),
    "a variable of its file": ("SCALE = 1.0", "SCALE = 2.0", {CODE}),
    "the inside of such a variable": ('"a": [1, 2]', '"a": [1, 3]', {CODE}),
    "a function inside a method": ("return y - 1", "return y - 2", {CODE}),
    "a method of its base class": ("return x + 1", "return x + 2", {CODE}),
    "a class attribute": ("rate = 1", "rate = 2", {CODE}),
    "an argument": ("Net(1.0)", "Net(2.0)", {VALUE}),
    "an argument that is not a number": ("Net(1.0)", "Net(math.inf)", {VALUE}),
    "a private attribute": (MADE, MADE + "; model._private = 4", {VALUE}),
    "a slot": (MADE, MADE + "; model.slot = 6", {VALUE}),
    "what it counts": (MADE, MADE + "; model.seen = 9", set()),
    "a running statistic": (MADE, MADE + "; model.running += 1", set()),
    "an argument of a layer": (MADE, MADE + "; model.layers[1].p = 0.2", {"structure.layers.1"}),
    "a layer": (MADE, MADE + "; model.layers[2] = nn.Tanh()", {"structure.layers.2"}),
    "a frozen layer": (MADE, MADE + "; model.layers.requires_grad_(False)",
                       {"weights.layers.0.weight", "weights.layers.0.bias"}),
    "the loss": ("mean(1)", "sum(1)", {LOSS}),
    "weights of the loss": ("weight\", torch.ones(3)", "weight\", torch.zeros(3)", {LOSS}),
    "what the loss remembers": ("self.step = None", "self.step = 7", {LOSS}),  # its code
    "the collate function": ("* 1.0", "* 2.0", {VALID}),
    "the validation samples": ('"points"', '"others"', {VALID}),
    "a forward that is put in place": (MADE, MADE + "; model.forward = lambda x: x", {CODE}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_noticed_by_its_name(tmp_path: Path, name: str) -> None:
    old, new, expected = CHANGES[name]
    assert SOURCE.count(old) >= 1
    before, after = (describe(tmp_path, source) for source in (SOURCE, SOURCE.replace(old, new, 1)))
    assert set(list_differences(before, after)) == expected


LOSSES: list[tuple[str, str, set[str]]] = [
    ("partial(weighed, factor=3.0)", "partial(weighed, factor=4.0)", {"loss.arguments.factor", LOSS}),
    ("make_loss(1.0)", "make_loss(2.0)", {LOSS}),
    ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(ignore_index=3)", {"loss.arguments.ignore_index", LOSS}),
    ("nn.HuberLoss()", "nn.HuberLoss(delta=2.0)", {"loss.arguments.delta", LOSS}),
]


@pytest.mark.parametrize(("one", "other", "expected"), LOSSES)
def test_losses_of_any_kind_have_arguments(tmp_path: Path, one: str, other: str, expected: set[str]) -> None:
    sources = [SOURCE.replace('Loss(), "points"', f'{loss}, "points"') for loss in (one, one, other)]
    first, again, changed = (describe(tmp_path, source) for source in sources)
    assert first == again, "the same in another process"
    assert set(list_differences(first, changed)) == expected


def test_what_training_leaves_behind_is_no_change(tmp_path: Path) -> None:
    used = SOURCE + "model(torch.ones(3, 2)); loss(torch.ones(2, 2), torch.ones(2, 2))\n"
    found = [describe(tmp_path, source) for source in (SOURCE, used)]
    assert found[0] == found[1]


def test_code_without_a_file_is_told_apart_too() -> None:
    """As that of a notebook whose cells are gone."""

    def measured(power: int) -> dict[str, str]:
        names: dict[str, Any] = {"nn": nn, "__name__": "a cell"}
        exec(f"class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) ** {power}\n", names)
        return digest_measure(names["Net"](2, 2), SupervisedTask(nn.MSELoss()), "", None)

    assert measured(1) == measured(1)
    assert set(list_differences(measured(1), measured(2))) == {"the model's code"}

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from specs import window_spec
from torch import nn

from trainer.config import ConfigError, FactoryConfig
from trainer.model.build import build_model
from trainer.model.losses import StudentTLoss
from trainer.model.stock import STOCK, DilatedTree, SpanAverages, Standardize

SPEC = window_spec(
    "abcdefgh", 60, feature_mean=tuple(0.1 * k for k in range(8)), feature_std=tuple(0.5 + k for k in range(8))
)


def outputs_of(name: str) -> int:
    return 8 if name == "har_tcn" else 3


@pytest.mark.parametrize("window", [1, 2, 7, 60, 64])
@pytest.mark.parametrize("name", sorted(STOCK))
def test_stock_models_start_at_the_unconditional_forecast(name: str, window: int) -> None:
    torch.manual_seed(0)
    outputs = outputs_of(name)
    model = build_model(FactoryConfig(factory=name), replace(SPEC, window=window), outputs)
    torch.testing.assert_close(model(torch.randn(5, window, 8)), torch.zeros(5, outputs))


def test_the_default_model_is_small() -> None:
    model = build_model(FactoryConfig(factory="har_tcn"), SPEC, 8)
    assert 10_000 < sum(parameter.numel() for parameter in model.parameters()) < 13_000


def test_averages_of_days_divide_the_window() -> None:
    """The last day alone, then further back ever more days at once, each day in one average."""
    x = torch.rand(1, 60, 2)
    back = x[0].flip(0)
    bounds = [0, 1, 2, 3, 5, 10, 22, 40, 60]
    spans = [back[first:last] for first, last in itertools.pairwise(bounds)]
    expected = torch.stack([span.sum(0) / len(span) ** 0.5 for span in spans], -1)
    torch.testing.assert_close(SpanAverages(60)(x), expected.flatten()[None])


def test_a_model_of_two_forecasts_refuses_a_loss_of_one() -> None:
    with pytest.raises(ConfigError, match=r"two forecasts .* this loss needs 3 numbers: .* use the model tcn"):
        build_model(FactoryConfig(factory="har_tcn"), SPEC, 3)


@pytest.mark.parametrize("window", [5, 60, 64])
def test_the_tree_equals_dilated_causal_convolutions(window: int) -> None:
    torch.manual_seed(1)
    tree = DilatedTree(window, 8, 6, dropout=0.0)
    x = torch.randn(4, window, 8)
    y = nn.functional.pad(x, (0, 0, tree.padding, 0)).transpose(1, 2)
    for index, layer in enumerate(tree.layers):
        kernel = layer.weight.reshape(6, 2, -1).permute(0, 2, 1)  # (out, in, the earlier and the later day)
        padded = nn.functional.pad(y, (2**index, 0))
        out = nn.functional.relu(nn.functional.conv1d(padded, kernel, layer.bias, dilation=2**index))
        y = out + y if index else out
    torch.testing.assert_close(tree(x), y[:, :, -1])


@pytest.mark.parametrize("name", sorted(STOCK))
def test_every_day_of_the_window_matters(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(FactoryConfig(factory=name, args={"dropout": 0.0}), SPEC, outputs_of(name))
    for parameter in model.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter)
    x = torch.randn(2, 60, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert (x.grad.abs().sum(dim=(0, 2)) > 0).all()


def test_the_last_layer_of_the_transformer_equals_the_whole_one_where_it_is_read() -> None:
    """And takes its weights, by the same names: models that were saved with whole layers can be loaded."""
    torch.manual_seed(0)
    model = build_model(FactoryConfig(factory="transformer"), SPEC, 3)
    whole = copy.deepcopy(model)
    layers = whole.get_submodule("model.body.encoder.layers")
    assert isinstance(layers, nn.ModuleList)
    layers[-1] = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    whole.load_state_dict(model.state_dict())
    x = torch.randn(16, 60, 8)
    outputs = [each(x) for each in (model, whole)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5 * float(theirs.grad.abs().max()))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), whole.eval()(x))


def test_standardisation_travels_with_the_weights() -> None:
    model = Standardize(nn.Flatten(), replace(SPEC, feature_std=(0.0, *SPEC.feature_std[1:])))
    x = torch.full((1, 60, 8), 3.0)
    expected = (3.0 - torch.tensor(SPEC.feature_mean)) / torch.tensor((1.0, *SPEC.feature_std[1:]))
    torch.testing.assert_close(model(x).reshape(60, 8)[0], expected)
    assert set(model.state_dict()) == {"mean", "std"}


def test_a_crash_does_not_swing_the_forecast_without_bound() -> None:
    torch.manual_seed(0)
    model = build_model(FactoryConfig(factory="tcn"), SPEC, 3).eval()
    nn.init.normal_(model.get_submodule("model.skip").weight)
    crash = torch.full((1, 60, 8), 1e3)
    torch.testing.assert_close(model(crash), model(10 * crash))


def test_the_default_model_learns_a_volatility_that_is_there() -> None:
    torch.manual_seed(0)
    spec = replace(SPEC, window=8, feature_mean=(0.0,) * 8, feature_std=(1.0,) * 8)
    loss = StudentTLoss(spec)
    model = build_model(FactoryConfig(factory="tcn"), spec, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(256, 8, 8)
        return x, 0.04 * torch.exp(0.8 * x[:, -1, 0]) * torch.randn(256)

    test = batch()
    before = loss(model(test[0]), test[1]).mean().item()
    for _ in range(80):
        x, y = batch()
        optimizer.zero_grad()
        loss(model(x), y).mean().backward()
        optimizer.step()
    assert loss(model.eval()(test[0]), test[1]).mean().item() < before - 0.1


OWN = """
from torch import nn
def make(spec, outputs, hidden=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.window * len(spec.features), outputs))
def short(spec, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(spec.window * len(spec.features), 1))
def swapped(spec, outputs):
    return nn.Linear(spec.window, outputs)
def nothing(spec, outputs): return 5
def frozen(spec, outputs): return nn.Flatten()
def failing(spec, outputs): raise RuntimeError("no weights file")
"""


@pytest.mark.parametrize(
    ("factory", "args", "message"),
    [
        ("resnet", {}, r"neither a stock model \(har_tcn, lstm, tcn, transformer\)"),
        ("tcn", {"chanels": 3}, r"'chanels'; it accepts: channels: 'int' = 32, dropout: 'float' = 0\.1"),
        ("transformer", {"width": 30}, r"width = 30 must be a multiple of heads = 4"),
        ("own_model_module:short", {}, r"gave \(2, 1\) for a batch of shape \(2, 60, 8\); expected \(2, 3\)"),
        ("own_model_module:swapped", {}, r"failed on a batch of shape \(2, 60, 8\) \(batch, window, features\)"),
        ("own_model_module:nothing", {}, r"returned a int; it must return a torch\.nn\.Module"),
        ("own_model_module:frozen", {}, r"without parameters to train"),
        ("own_model_module:failing", {}, r"raised RuntimeError: no weights file"),
    ],
)
def test_an_unusable_model_is_refused_by_name(
    factory: str, args: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "own_model_module")
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(FactoryConfig(factory=factory, args=args), SPEC, 3)
    assert factory in str(caught.value)

"""The stock models of windows.

Every model maps windows (B, W, F), standardised float32, to (B, outputs). `trainer.model.build` wraps it in
`Standardize`, so what is trained, saved and served takes raw feature windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.spec import DataSpec


class Standardize(nn.Module):
    """A model behind standardisation, (x - mean) / std. Mean and deviation are buffers, so they are saved with the
    weights."""

    mean: Tensor
    std: Tensor
    has_constant_buffers = True
    """Whether no step changes them, so that none need be kept in case it fails."""

    def __init__(self, model: nn.Module, spec: DataSpec) -> None:
        super().__init__()
        std = torch.tensor(spec.feature_std, dtype=torch.float32)
        self.register_buffer("mean", torch.tensor(spec.feature_mean, dtype=torch.float32))
        self.register_buffer("std", torch.where(std > 0, std, torch.ones_like(std)))  # a constant feature stays zero
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        """Return outputs (B, outputs) for raw windows (B, W, F)."""
        return self.model((windows - self.mean).div_(self.std))


class LinearSkip(nn.Module):
    """``head(body(x)) + linear(flattened x)``, both starting at zero.

    The linear part alone is the ridge regression on the window, which is hard to beat on volatility; the body only has
    to learn what is left. Starting at zero means starting at the unconditional distribution of the loss. The flattened
    inputs are many and much alike, so one step of Adam on all their weights moves the output by about the learning
    rate times their number: dividing by that number keeps the step in proportion to the body's (without it, a learning
    rate of 2e-3 diverged).
    """

    def __init__(self, body: nn.Module, width: int, spec: DataSpec, outputs: int) -> None:
        super().__init__()
        size = spec.window * len(spec.features)
        self.body = body
        self.head = nn.Linear(width, outputs)
        self.skip = nn.Linear(size, outputs, bias=False)
        self.skip_scale = 5 / size
        for parameter in (self.head.weight, self.head.bias, self.skip.weight):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (B, outputs) for standardised windows (B, W, F)."""
        x = x.clamp(-8, 8)  # a crash beyond eight deviations says no more, and must not swing the linear part
        return self.head(self.body(x)) + self.skip(x.flatten(1)) * self.skip_scale


class DilatedTree(nn.Module):
    """Causal convolutions of kernel 2 with dilations 1, 2, 4, …, evaluated only where the last output needs them.

    The output at the last day of layer k looks at two outputs of layer k - 1, 2^(k-1) days apart, so of W positions it
    needs W / 2^k: pairs of neighbours become one row of a matrix product, and the whole stack costs about as much as
    its first two layers. The result equals the dilated convolutions' last time step. (B, W, F) -> (B, channels).
    """

    def __init__(self, window: int, features: int, channels: int, dropout: float) -> None:
        super().__init__()
        depth = max(1, math.ceil(math.log2(window)))
        self.padding = 2**depth - window
        widths = [features] + [channels] * depth
        self.layers = nn.ModuleList(nn.Linear(2 * width, channels) for width in widths[:-1])
        self.dropout = nn.Dropout(dropout)  # once, at the end: a mask for every layer took half of a step's time

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, channels) for windows (B, W, F)."""
        x = nn.functional.pad(x, (0, 0, self.padding, 0))  # days before the window: zero, the mean
        for index, layer in enumerate(self.layers):
            y = nn.functional.relu(layer(x.reshape(x.shape[0], x.shape[1] // 2, 2 * x.shape[2])))
            x = y + x[:, 1::2] if index else y  # the later of the two days goes on unchanged
        return self.dropout(x[:, 0])


class LastState(nn.Module):
    """An LSTM of which the state after the last day is returned. (B, W, F) -> (B, hidden)."""

    def __init__(self, features: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state (B, hidden) for windows (B, W, F)."""
        return self.dropout(self.lstm(x)[0][:, -1])


class LastOfLayer(nn.TransformerEncoderLayer):
    """The last layer of an encoder that is read at its last position only: (B, W, width) -> (B, 1, width).

    Keys and values come from all positions, all else is computed for the last one. Parameters have the names of the
    class that it comes from, and the result is the same to rounding, for about a third of the work.
    """

    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the last position (B, 1, width) for all positions (B, W, width)."""
        around = self.norm1(src)
        seen, _ = self.self_attn(around[:, -1:], around, around, need_weights=False)
        x = src[:, -1:] + self.dropout1(seen)
        inner = self.dropout(self.activation(self.linear1(self.norm2(x))))
        return x + self.dropout2(self.linear2(inner))


class LastToken(nn.Module):
    """A transformer encoder over the days, read at the last one. (B, W, F) -> (B, width)."""

    def __init__(self, window: int, features: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.position = nn.Parameter(torch.randn(window, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
        last = LastOfLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
        last.load_state_dict(block.state_dict())  # as in torch's encoder, all layers start alike
        for layer in (block, last):
            layer.self_attn.dropout = 0.0  # with dropout inside, attention on a CPU falls back to a slow kernel
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.encoder.layers[-1] = last
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, width) for windows (B, W, F)."""
        return self.norm(self.encoder(self.embed(x) + self.position)[:, -1])


class SpanAverages(nn.Module):
    """Averages of each feature over the last day, days 2, 3, 4 to 5, 6 to 10, and so on: the inputs of Corsi's
    heterogeneous autoregression (2009). (B, W, F) -> (B, F · spans)."""

    averages: Tensor
    starts = (0, 1, 2, 3, 5, 10, 22, 40)
    """Days back from the last one at which spans begin; each ends where the next begins, the last with the window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        bounds = [*(start for start in self.starts if start < window), window]
        spans = list(itertools.pairwise(bounds))
        self.count = len(spans)
        # Divided by the root of their number, independent days have a variance of one in each span.
        weights = [[(a <= back < b) / math.sqrt(b - a) for a, b in spans] for back in range(window)]
        self.register_buffer("averages", torch.tensor(weights[::-1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return averages (B, F · spans) for standardised windows (B, W, F)."""
        return (x.clamp(-8, 8).transpose(1, 2) @ self.averages).flatten(1)


class HarTcn(nn.Module):
    """Two forecasts, each trained by its own loss: a linear one of the scale, from averages of days, and a temporal
    convolution of mean and scale. Both have one shape and one ratio of volatility to scale for all days. (B, W, F) ->
    (B, 8): see `trainer.model.losses.ReturnAndVolatility`.

    The linear one has no mean. Where a crisis goes beyond all that was seen, it errs less than a network that may bend
    everything.
    """

    linear_unit = 0.3
    """Its weights are many and much alike, and the same is true of them as in `LinearSkip`."""
    constants_unit = 5.0
    """Four numbers that all samples share have far to go: at the pace of the other weights they did not arrive."""

    def __init__(self, spec: DataSpec, channels: int, dropout: float) -> None:
        super().__init__()
        features = len(spec.features)
        self.averages = SpanAverages(spec.window)
        self.linear = nn.Linear(features * self.averages.count, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.network = LinearSkip(DilatedTree(spec.window, features, channels, dropout), channels, spec, outputs=2)
        self.constants = nn.Parameter(torch.zeros(2, 2))
        """Of each forecast: raw shape, and log volatility over scale."""

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (B, 8) for standardised windows (B, W, F)."""
        scale = self.linear(self.averages(x)) * self.linear_unit
        of_linear, of_network = (self.constants * self.constants_unit).expand(len(x), 2, 2).unbind(1)
        return torch.cat([torch.zeros_like(scale), scale, of_linear, self.network(x), of_network], 1)


def har_tcn(spec: DataSpec, outputs: int, channels: int = 32, dropout: float = 0.1) -> nn.Module:
    """Return a linear forecast from averages beside a temporal convolutional network with a linear skip. Raise
    ValueError for a loss that does not judge two forecasts."""
    if outputs != 8:
        raise ValueError(
            "it makes two forecasts of four numbers each, for the loss return_and_volatility, but this loss needs "
            f"{outputs} numbers: keep the usual loss, or use the model tcn"
        )
    return HarTcn(spec, channels, dropout)


def tcn(spec: DataSpec, outputs: int, channels: int = 32, dropout: float = 0.1) -> nn.Module:
    """Return a temporal convolutional network with a linear skip; about 12,000 parameters by default."""
    return LinearSkip(DilatedTree(spec.window, len(spec.features), channels, dropout), channels, spec, outputs)


def lstm(spec: DataSpec, outputs: int, hidden: int = 48, layers: int = 1, dropout: float = 0.1) -> nn.Module:
    """Return a long short-term memory with a linear skip."""
    return LinearSkip(LastState(len(spec.features), hidden, layers, dropout), hidden, spec, outputs)


def transformer(
    spec: DataSpec, outputs: int, width: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.0
) -> nn.Module:
    """Return a transformer encoder with a linear skip."""
    if width % heads:
        raise ValueError(f"width = {width} must be a multiple of heads = {heads}")
    body = LastToken(spec.window, len(spec.features), width, heads, layers, dropout)
    return LinearSkip(body, width, spec, outputs)


STOCK: dict[str, Callable[..., nn.Module]] = {"har_tcn": har_tcn, "tcn": tcn, "lstm": lstm, "transformer": transformer}

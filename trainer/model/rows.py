"""The stock models and losses for rows of a table.

A model maps encoded rows (B, inputs), float32, to (B, outputs). `trainer.model.build` wraps it in `RowInputs`, so what
is trained and saved takes rows as they are stored: numbers in deviations from their mean, and categories as codes. A
saved model standardises what it is given (`trainer.model.saved_model`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.config import ConfigError
from trainer.model.allowed_factories import usual_parts
from trainer.spec import BINARY, REGRESSION, ROWS, RowSpec


class RowEncoder(nn.Module):
    """Turns stored rows into what models take.

    A number is stored standardised; where it is missing, it counts as the mean, and a further input is 1. A category
    becomes one input for each of its values, which is 1 for that value: none is for a missing or unknown one.
    """

    numbers: Tensor
    unsure: Tensor
    values: Tensor
    columns: Tensor

    def __init__(self, spec: RowSpec) -> None:
        super().__init__()
        numbers = [place for place, values in enumerate(spec.categories) if not values]
        pairs = [(place, code + 1) for place, values in enumerate(spec.categories) for code in range(len(values))]

        def buffer(name: str, values: list[float] | list[int], kind: torch.dtype) -> None:
            self.register_buffer(name, torch.tensor(values, dtype=kind))

        buffer("numbers", numbers, torch.int64)
        buffer("unsure", [place for place in numbers if spec.has_missing[place]], torch.int64)
        buffer("columns", [place for place, _ in pairs], torch.int64)
        buffer("values", [code for _, code in pairs], torch.float32)

    def forward(self, rows: Tensor) -> Tensor:
        """Return encoded rows (B, inputs) for stored rows (B, columns), both float32."""
        parts = [torch.nan_to_num(rows.index_select(1, self.numbers), nan=0.0)]
        if len(self.unsure):
            parts.append(torch.isnan(rows.index_select(1, self.unsure)).float())
        if len(self.columns):
            parts.append((rows.index_select(1, self.columns) == self.values).float())
        return torch.cat(parts, dim=1)


class RowInputs(nn.Module):
    """A model behind `RowEncoder`."""

    def __init__(self, model: nn.Module, spec: RowSpec) -> None:
        super().__init__()
        self.encoder = RowEncoder(spec)
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        """Return outputs (B, outputs) for stored rows (B, columns)."""
        return self.model(self.encoder(rows))


def linear(spec: RowSpec, outputs: int) -> nn.Module:
    """Return a linear model, which starts at zero: at the constant."""
    return linear_head(spec.inputs, outputs)


def mlp(spec: RowSpec, outputs: int, width: int = 128, layers: int = 2, dropout: float = 0.0) -> nn.Module:
    """Return a multilayer perceptron; its last layer starts at zero: at the constant."""
    if width < 1 or layers < 1:
        raise ValueError(f"width = {width}, layers = {layers}: both must be at least 1")
    parts: list[nn.Module] = []
    size = spec.inputs
    for _ in range(layers):
        parts += [nn.Linear(size, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        size = width
    return nn.Sequential(*parts, linear_head(size, outputs))


def linear_head(width: int, outputs: int) -> nn.Linear:
    """Return a last layer that starts at zero."""
    layer = nn.Linear(width, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class SquaredError(nn.Module):
    """Squared error in units of the target's training variance; one output, in deviations from the target's mean."""

    outputs = 1

    def __init__(self, spec: RowSpec) -> None:
        super().__init__()
        if spec.task != REGRESSION:
            raise ConfigError(_misfit("squared_error", spec))
        self.mean, self.unit = spec.target_mean, spec.target_std

    def point(self, outputs: Tensor) -> Tensor:
        """Return the forecasts (B,) for raw outputs (B, 1), in the unit of the target, float64: single precision has no
        digits left for a large mean with a small deviation."""
        return outputs.double()[:, 0] * self.unit + self.mean

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row (B,), for raw outputs (B, 1) and targets (B,)."""
        return (outputs.float()[:, 0] - ((target.double() - self.mean) / self.unit).float()) ** 2


class Logistic(nn.Module):
    """Cross entropy of two classes in nats; one output, the logarithm of the odds of the second."""

    outputs = 1

    def __init__(self, spec: RowSpec) -> None:
        super().__init__()
        if spec.task != BINARY:
            raise ConfigError(_misfit("logistic", spec))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probability of each class (B, 2) for raw outputs (B, 1)."""
        odds = outputs.float()[:, 0]
        return torch.stack([torch.sigmoid(-odds), torch.sigmoid(odds)], dim=1)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row (B,), for raw outputs (B, 1) and codes of classes (B,)."""
        return functional.binary_cross_entropy_with_logits(outputs.float()[:, 0], target.float(), reduction="none")


class CrossEntropy(nn.Module):
    """Cross entropy of any number of classes in nats; one output for each class, softmax."""

    def __init__(self, spec: RowSpec) -> None:
        super().__init__()
        if not spec.classes:
            raise ConfigError(_misfit("cross_entropy", spec))
        self.outputs = len(spec.classes)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probability of each class (B, C) for raw outputs (B, C)."""
        return functional.softmax(outputs.float(), dim=1)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row (B,), for raw outputs (B, C) and codes of classes (B,)."""
        return functional.cross_entropy(outputs.float(), target, reduction="none")


def _misfit(loss: str, spec: RowSpec) -> str:
    return (
        f"loss.factory = {loss!r} does not fit {spec.target!r}, whose task is {spec.task}: use "
        f"{usual_parts(ROWS, spec.task)[1]!r}"
    )


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "linear": linear}
LOSSES: dict[str, type[nn.Module]] = {
    "squared_error": SquaredError,
    "logistic": Logistic,
    "cross_entropy": CrossEntropy,
}

"""The stock model at a pace: a pause for each micro-batch, so that a small training lasts long enough to be disturbed,
leaves the processor free, and takes as much longer on fewer nodes as it would on nodes that compute.

And smooth: with ReLU, a unit that comes within rounding of its kink, once in many thousand steps, passes a gradient in
one world and none in another, and the weights of its layer and those below it then differ by far more than rounding,
though nothing was lost.
"""

from __future__ import annotations

import os
import time
from unittest import mock

import torch
from torch import Tensor, nn

from trainer.model.stock import tcn as stock_tcn
from trainer.spec import DataSpec


class Paced(nn.Module):
    def __init__(self, body: nn.Module, pause_seconds: float) -> None:
        super().__init__()
        self.body, self.pause_seconds = body, pause_seconds

    def forward(self, windows: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.pause_seconds)
        with mock.patch.object(nn.functional, "relu", nn.functional.silu):
            return self.body(windows)


def tcn(
    spec: DataSpec, outputs: int, pause_seconds: float = 0.012, channels: int = 16, dropout: float = 0.1
) -> nn.Module:
    return Paced(stock_tcn(spec, outputs, channels, dropout), pause_seconds)


SIDE = 192
"""Rows and columns of the matrices that `Busy` multiplies."""


def multiply(rounds: int) -> None:
    """Compute for a while: products of matrices, on one thread for each rank as the rest of the model."""
    with torch.no_grad():
        matrix = torch.full((SIDE, SIDE), 1.0 / SIDE)
        product = matrix
        for _ in range(rounds):
            product = product @ matrix


class Busy(nn.Module):
    """The stock model that really computes for longer: ``rounds`` products for each micro-batch, on ``slow_node`` that
    many ``more`` of them. ``ballast`` parameters more make its gradients large. With more samples at once than ``fits``
    (0: any number), it asks for more memory than there is, and gets torch's own refusal."""

    def __init__(self, body: nn.Module, rounds: int, slow_node: int | None, more: int, ballast: int, fits: int) -> None:
        super().__init__()
        self.body, self.rounds, self.fits = body, rounds, fits
        if slow_node is not None and os.environ.get("NODE_RANK") == str(slow_node):
            self.rounds += more
        self.ballast = nn.Parameter(torch.zeros(ballast)) if ballast else None

    def forward(self, windows: Tensor) -> Tensor:
        if self.training:
            if self.fits and len(windows) > self.fits:
                torch.empty(1 << 50, dtype=torch.uint8)
            multiply(self.rounds)
        outputs: Tensor = self.body(windows)
        return outputs if self.ballast is None else outputs + 1e-9 * self.ballast.sum()


def busy_tcn(
    spec: DataSpec, outputs: int, rounds: int = 0, slow_node: int | None = None, more: int = 0, ballast: int = 0,
    fits: int = 0, channels: int = 16,
) -> nn.Module:  # fmt: skip
    return Busy(stock_tcn(spec, outputs, channels, 0.0), rounds, slow_node, more, ballast, fits)

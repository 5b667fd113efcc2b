"""The stock model at a pace: a pause for each micro-batch, so that a small training lasts long enough to be disturbed,
leaves the processor free, and takes as much longer on fewer nodes as it would on nodes that compute.

And smooth: with ReLU, a unit that comes within rounding of its kink, once in many thousand steps, passes a gradient in
one world and none in another, and the weights of its layer and those below it then differ by far more than rounding,
though nothing was lost.
"""

from __future__ import annotations

import time
from unittest import mock

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

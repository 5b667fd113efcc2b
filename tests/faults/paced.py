"""The stock model at a pace: a pause for each micro-batch, so that a small training lasts long enough to be disturbed,
leaves the processor free, and takes as much longer on fewer nodes as it would on nodes that compute."""

from __future__ import annotations

import time

from torch import Tensor, nn

from trainer.model import tcn as stock_tcn
from trainer.spec import DataSpec


class Paced(nn.Module):
    def __init__(self, body: nn.Module, pause_seconds: float) -> None:
        super().__init__()
        self.body, self.pause_seconds = body, pause_seconds

    def forward(self, windows: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.pause_seconds)
        return self.body(windows)


def tcn(
    spec: DataSpec, outputs: int, pause_seconds: float = 0.012, channels: int = 16, dropout: float = 0.1
) -> nn.Module:
    return Paced(stock_tcn(spec, outputs, channels, dropout), pause_seconds)

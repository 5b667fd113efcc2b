"""A gated recurrent unit that reads the window from the oldest day to the newest."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.spec import DataSpec


class RecurrentForecaster(nn.Module):
    def __init__(self, features: int, outputs: int, hidden: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, outputs)
        # Zero outputs are the loss's unconditional forecast: a good place to start from.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, windows: Tensor) -> Tensor:
        """(batch, window, features) -> (batch, outputs)."""
        states, _ = self.recurrent(windows)
        return self.head(states[:, -1])


def make_model(spec: DataSpec, outputs: int, hidden: int = 32) -> nn.Module:
    """What ``model.factory`` names. ``spec`` tells the shape of the data, ``outputs`` what the loss asks for."""
    return RecurrentForecaster(len(spec.features), outputs, hidden)

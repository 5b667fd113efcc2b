"""A gated recurrent unit that reads the window from the oldest day to the newest."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.spec import DataSpec


class RecurrentForecaster(nn.Module):
    """A GRU with a linear head on its last state."""

    def __init__(self, features: int, outputs: int, hidden: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, outputs)
        # Zero outputs are the loss's unconditional forecast, a good starting point.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the outputs (batch, outputs) for windows (batch, window, features)."""
        states, _ = self.recurrent(windows)
        return self.head(states[:, -1])


def make_model(spec: DataSpec, outputs: int, hidden: int = 32) -> nn.Module:
    """Return the model; ``model.factory`` names this function. ``spec`` has the shape of the data, ``outputs`` is the
    number of outputs that the loss needs."""
    return RecurrentForecaster(len(spec.features), outputs, hidden)

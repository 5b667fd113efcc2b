"""A rank's side of the benchmark: the case that it trains, and its turns."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Client

ADDRESS = "BENCHMARK_TURNS"
"""Environment variable: the socket at which the benchmark listens."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, equal for all frameworks but for the fields that each may choose."""

    model: str
    batch: int
    """Samples per rank and optimizer step."""
    ranks: int
    dataset: str
    folder: str
    """Folder in which a framework may write."""
    port: int
    seed: int = 0
    learning_rate: float = 2e-3
    clip_norm: float = 1.0
    weight_decay: float = 1e-2
    workers: int = 0
    """Worker processes of a DataLoader."""
    ddp: dict[str, bool] = field(default_factory=dict)
    """Options of DistributedDataParallel."""


class Failed(str):
    """A result that says why a case failed."""


class Turns:
    """Counts steps, and blocks between intervals until the benchmark says how many steps come next."""

    def __init__(self, name: str, rank: int) -> None:
        self._connection = Client(os.environ[ADDRESS], family="AF_UNIX")
        self._connection.send((name, rank))
        self._left = 0
        self._began: list[float] = []
        """Times at which the steps of this interval began, by `time.monotonic`."""

    def next_case(self) -> Case | None:
        """Wait for the next case and return it; None: there is none, and the process may end."""
        self._left, self._began = 0, []
        return self._connection.recv()

    def done(self, failed: Failed | None = None) -> None:
        """Say that a case is over, or why it failed."""
        self._connection.send(failed)

    @property
    def is_due(self) -> bool:
        """True if the next call of `step` blocks."""
        return not self._left

    def step(self) -> bool:
        """Wait for the turn; return False if the case is over. To be called after each step and before the next."""
        if not self._left:
            self._connection.send([*self._began, time.monotonic()])
            self._left, self._began = self._connection.recv(), []
        self._began.append(time.monotonic())
        self._left -= 1
        return self._left >= 0

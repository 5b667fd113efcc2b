"""A rank's side of the benchmark: which case it trains, and when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from typing import Any

ADDRESS = "DTRAIN_BENCHMARK_TURNS"
"""Environment variable: the socket at which the benchmark listens."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained: equal for all frameworks, but for what each may choose."""

    model: str
    batch: int
    """Samples per rank and optimizer step."""
    ranks: int
    dataset: str
    folder: str
    """Where a framework may write."""
    port: int
    device: str = "cpu"
    precision: str = "fp32"
    seed: int = 0
    learning_rate: float = 2e-3
    clip_norm: float = 1.0
    weight_decay: float = 1e-2
    workers: int = 0
    """Of a DataLoader."""
    ddp: dict[str, bool] = field(default_factory=dict)
    """Options of DistributedDataParallel."""
    training: dict[str, Any] = field(default_factory=dict)
    """Settings of ours that differ from this."""
    judged_after: int | None = None
    """Train so many steps, with the learning rate of `trainer.engine.lr_schedule`, and report the validation loss."""


class Failed(str):
    """What went wrong in a case, said instead of a result."""


class Turns:
    """Counts steps, and blocks between stretches of them until the benchmark says how many come next."""

    def __init__(self, name: str, rank: int) -> None:
        self._connection = Client(os.environ[ADDRESS], family="AF_UNIX")
        self._connection.send((name, rank))
        self._left = 0
        self._began: list[float] = []
        """When each step of this stretch did."""
        self.synchronize: Callable[[], Any] = lambda: None
        """Waits for the device: it may be behind."""

    def next_case(self) -> Case | None:
        """None: there is none; the process may end."""
        self._left, self._began = 0, []
        return self._connection.recv()

    def done(self, result: Any = None) -> None:
        self._connection.send(result)

    @property
    def is_due(self) -> bool:
        """Will the next call of `step` block?"""
        return not self._left

    def step(self) -> bool:
        """To be called when a step is about to begin and the one before is done. False: the case is over."""
        if not self._left:
            self.synchronize()
            self._connection.send([*self._began, time.monotonic()])
            self._left, self._began = self._connection.recv(), []
        self._began.append(time.monotonic())
        self._left -= 1
        return self._left >= 0

"""Windows of a sharded dataset as the data of a training.

How shards are read belongs in `trainer.data.shards`, and how batches of them are gathered in `trainer.data.loader`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.comm.world import World
from trainer.data.loader import BatchLoader
from trainer.data.sampler import Sampler
from trainer.data.shards import DataShardManager
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer


class WindowData:
    """The windows of ``shards``: batches are pairs (raw windows (B, W, F), targets (B,) or (B, 2)), float32."""

    def __init__(self, shards: DataShardManager) -> None:
        self.shards = shards

    @property
    def dataset_id(self) -> str:
        """The dataset's id, from its manifest."""
        return self.shards.spec.dataset_id

    def count(self, split: str) -> int:
        """Return the number of windows of a split."""
        return self.shards.count(split)

    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Return the windows at these positions, and their targets, on the device."""
        rows = self.shards.end_rows(split, positions)
        return tuple(part.to(device) for part in self.shards.gather(rows))

    def make_loader(
        self, sampler: Sampler, world: World, faults: Faults, timer: StepTimer, prefetch_batches: int | None
    ) -> BatchLoader:
        """Return the loader of this rank's windows."""
        return BatchLoader(self.shards, sampler, world, faults, timer, prefetch_batches)

    def close(self) -> None:
        """There is nothing to end: each loader ends its own thread."""

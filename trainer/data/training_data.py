"""What a training needs of its data, whatever its kind: samples that are counted, dealt and read by position.

The interfaces belong here; windows of prices are `trainer.data.shards`, a user's datasets
`trainer.data.dataset_data`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.loader import Reader


class TrainingData(Protocol):
    """The interface of a dataset with the splits ``train``, ``valid`` and ``test``, of which the last two may be
    empty."""

    @property
    def dataset_id(self) -> str:
        """The name of its content: a checkpoint belongs to one."""
        ...

    def count(self, split: str) -> int:
        """Return the number of samples of a split."""
        ...

    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Return the samples at these positions (0 … count - 1) as one batch on the device."""
        ...

    def make_reader(self, device: torch.device, prefetch_batches: int | None) -> Reader:
        """Return what reads the training samples of this rank for a `trainer.data.loader.BatchLoader`."""
        ...

    def close(self) -> None:
        """End what reads ahead for good."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """The interface of data that reads further batches while one is used."""

    def read_each(self, split: str, parts: Sequence[NDArray[np.int64]], device: torch.device) -> Iterator[Any]:
        """Yield what `TrainingData.read` returns for each of these positions, in order."""
        ...


def read_each(
    data: TrainingData, split: str, parts: Sequence[NDArray[np.int64]], device: torch.device
) -> Iterator[Any]:
    """Return what `TrainingData.read` returns for each of these positions, read ahead where the data can."""
    if isinstance(data, ReadsAhead):
        return data.read_each(split, parts, device)
    return (data.read(split, positions, device) for positions in parts)

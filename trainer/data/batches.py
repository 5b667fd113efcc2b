"""The samples of a training step, as tensors in any structure: tuples, lists, mappings and dataclasses of tensors.

What a batch is made of, and how a part of one is taken, belongs here; who reads samples, and when, does not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class BatchError(ValueError):
    """A batch has a part that cannot be divided among micro-batches. The message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one micro-batch."""

    number: int
    """The place of the micro-batch among those of its step."""
    count: int
    data: Any
    """What the collate function made of ``count`` samples; the first dimension of each tensor counts them. Of windows:
    raw windows (count, W, F) and targets (count,)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of a global batch, which may still be on its way to the device."""

    samples: int
    """In the global batch, over all ranks."""
    micro_batches: tuple[Samples, ...]
    """Those of this rank."""
    digest: int
    """The digest of this rank's samples, see `trainer.data.coverage`."""

    @property
    def local_samples(self) -> int:
        """Return the number of this rank's samples."""
        return sum(part.count for part in self.micro_batches)


def move_to(data: Any, device: torch.device) -> Any:
    """Return the same structure with its tensors on this device, and objects of other kinds as their own ``to`` moves
    them; other parts stay as they are."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if not _has_parts(data) and callable(to := getattr(data, "to", None)):
        return to(device)
    return _rebuilt(data, lambda part: move_to(part, device))


def take_rows(data: Any, rows: slice, count: int) -> Any:
    """Return a batch of ``count`` samples reduced to these rows. Raise `BatchError` for a part of which it is not known
    how it belongs to samples."""
    if isinstance(data, Tensor):
        if data.dim() and len(data) == count:
            return data[rows]
        raise BatchError(
            f"a tensor of shape {tuple(data.shape)} in a batch of {count} samples cannot be divided: the first "
            "dimension of each tensor must count samples, so that less can go "
            "through the model at once; or lower training.batch_size_per_gpu"
        )
    if isinstance(data, list | tuple) and len(data) == count and not _has_columns(data, count):
        return data[rows]  # such as a text for each sample
    if isinstance(data, np.ndarray) and data.ndim and len(data) == count:
        return data[rows]
    if not _has_parts(data) and not isinstance(data, str | bytes | int | float | None):
        raise BatchError(
            f"a {type(data).__name__} in a batch of {count} samples cannot be divided, so that less could go through "
            "the model at once: make the collate function return tensors in tuples, lists, mappings or dataclasses, or "
            "lower training.batch_size_per_gpu"
        )
    return _rebuilt(data, lambda part: take_rows(part, rows, count))


def _has_columns(parts: list[Any] | tuple[Any, ...], count: int) -> bool:
    """Return whether these are several columns of the samples, and not one part for each sample."""
    if any(isinstance(part, Mapping | list | tuple) for part in parts):
        return True
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return bool(tensors) and all(part.dim() and len(part) == count for part in tensors)


def _has_parts(data: Any) -> bool:
    return isinstance(data, Mapping | list | tuple) or _is_dataclass(data)


def _is_dataclass(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def _rebuilt(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, Mapping):
        parts = {key: change(part) for key, part in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return parts
        like = copy.copy(data)  # which keeps what a mapping of another kind has beside its items
        like.update(parts)
        return like
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(change, data))
    if isinstance(data, list | tuple):
        return type(data)(map(change, data))
    if _is_dataclass(data):
        fields = [item.name for item in dataclasses.fields(data) if item.init]
        return dataclasses.replace(data, **{name: change(getattr(data, name)) for name in fields})
    return data

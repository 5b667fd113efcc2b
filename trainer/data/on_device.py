"""What a GPU does for the data path. Copies of batches from pinned memory, in a stream beside the computation, which
follows each copy; and the order of an epoch, where the data is on the device, so that the host deals samples by their
places alone. The order's numbers are those of `trainer.data.sampler` and `trainer.data.coverage`, computed by torch: on
a host they take longer than a step of a small model takes on a GPU. Integers are signed here, and wrap as unsigned ones
do.

The host waits for no copy. Which copies are begun when, and what waits for what, is `DeviceCopies`; what only a GPU can
do is `CudaCopyStream`, which **no GPU has run yet**: tests use a stand-in whose copies come as late or as early as may
be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.coverage import GOLDEN, MIXERS, SHIFTS
from trainer.data.sampler import MIXING, permutation_keys
from trainer.runtime.nested import map_leaves


class CopyStream(Protocol):
    """The interface of a stream of copies to a device."""

    def beside(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work goes into the stream."""
        ...

    def copy(self, part: Tensor) -> Tensor:
        """Submit the copy of a tensor of the host, and return what will have its values."""
        ...

    def record(self) -> Any:
        """Return an event that is done when all copies that were submitted so far are."""
        ...

    def follow(self, event: Any) -> None:
        """Let the work that this thread submits from now on begin after the event."""
        ...

    def keep(self, part: Tensor) -> None:
        """Let the memory of a copy go to no other one before the work is done that this thread has submitted by the
        time when the tensor is freed."""
        ...


class CudaCopyStream:
    """A stream of copies to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def copy(self, part: Tensor) -> Tensor:
        return part.pin_memory().to(self._device, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def follow(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, part: Tensor) -> None:
        part.record_stream(torch.cuda.current_stream(self._device))


Started = tuple[Any, list[Tensor], Any]
"""A batch whose copy was submitted: the batch, its tensors that are copies, and the event that ends them."""


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """Copies of batches to a device."""

    stream: CopyStream

    def start(self, data: Any) -> Started:
        """Submit the copies of a batch, tensors in any structure. What is no plain tensor of the host stays as it
        is."""
        copied: list[Tensor] = []

        def copy(part: Any) -> Any:
            if type(part) is not Tensor or not part.is_cpu or part.layout is not torch.strided:
                return part
            copied.append(self.stream.copy(part))
            return copied[-1]

        with self.stream.beside():
            return map_leaves(copy, data), copied, self.stream.record()

    def take(self, started: Started) -> Any:
        """Return a batch whose copy was submitted: what this thread submits from now on may read it."""
        data, copied, event = started
        self.stream.follow(event)
        for part in copied:
            self.stream.keep(part)
        return data

    def ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches as they are on the device; the copy of the next one is submitted before."""
        waiting: list[Started] = []
        for batch in batches:
            waiting.append(self.start(batch))
            if len(waiting) > 1:
                yield self.take(waiting.pop(0))
        if waiting:
            yield self.take(waiting.pop())


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """The samples of an epoch, in its order, on a device."""

    samples: Tensor
    """Positions within the split (n,), int64."""
    sums: Tensor
    """Sums of the samples' hashes before each place (n + 1,), modulo 2^64."""

    @classmethod
    def of_epoch(cls, size: int, seed: int, epoch: int, device: torch.device) -> DeviceOrder:
        """Return the order of this epoch of a split with ``size`` samples, as `trainer.data.sampler.permute` has it."""
        half_bits, keys = permutation_keys(size, seed, epoch)
        samples = _feistel(torch.arange(size, device=device), keys, half_bits)
        while bool((outside := samples >= size).any()):
            samples = torch.where(outside, _feistel(samples, keys, half_bits), samples)
        sums = torch.zeros(size + 1, dtype=torch.int64, device=device)
        torch.cumsum(_hashes(samples), 0, out=sums[1:])
        return cls(samples, sums)

    def digests(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> list[int]:
        """Return the digest (`trainer.data.coverage`) of the samples at places [first, last), for each pair. The host
        waits for the device."""
        edges = torch.from_numpy(np.concatenate([first, last])).to(self.sums.device)
        begin, end = self.sums[edges].cpu().numpy().reshape(2, -1)
        return (end - begin).tolist()


@dataclass(frozen=True, slots=True)
class Places:
    """The positions of samples as places [first, last) in the order of an epoch. Which they are is worked out when
    somebody asks."""

    first: int
    last: int
    order: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Returns the positions at places."""

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> int:
        return int(self.order(np.array([range(self.first, self.last)[index]]))[0])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return values shifted right as unsigned numbers are."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _feistel(values: Tensor, keys: list[int], half_bits: int) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = values >> half_bits, values & mask
    for key in keys:
        mixed = right ^ _signed(key)
        for factor, moved in MIXING:
            mixed *= _signed(factor)
            mixed ^= _shifted(mixed, moved)
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right


def _hashes(samples: Tensor) -> Tensor:
    values = samples + _signed(GOLDEN)
    for shift, factor in zip(SHIFTS, MIXERS, strict=False):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return values ^ _shifted(values, SHIFTS[-1])

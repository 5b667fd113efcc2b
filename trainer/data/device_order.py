"""The order of an epoch on the device that holds the data, so that the host deals samples by their places alone.

The numbers are those of `trainer.data.sampler` and `trainer.data.coverage`, computed by torch: on a host they take
longer than a step of a small model takes on a GPU. Integers are signed here, and wrap as unsigned ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.coverage import GOLDEN, MIXERS, SHIFTS
from trainer.data.sampler import MIXING, permutation_keys


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

"""Which samples belong to which step, and which of them to this rank: stateless, the same at any world size.

The order of an epoch is a permutation computed on demand (a Feistel network keyed by seed and epoch), so nothing has
to be stored or saved: position p of epoch e is sample ``permutation(p)``, whoever asks and whenever. Numpy only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError

_ROUNDS = 6


def permute(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where ``indices`` (any shape, values in [0, size)) go under the permutation of this seed and epoch.

    A balanced Feistel network over the next even power of two, walked until it lands inside [0, size) again
    (Black and Rogaway 2002, «cycle walking»): a bijection without a table, in O(len(indices)).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    keys = [
        np.uint64(int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), digest_size=8).digest(), "big"))
        for number in range(_ROUNDS)
    ]
    values = np.asarray(indices, dtype=np.uint64).ravel()
    result = _feistel(values, keys, half_bits, mask)
    outside = result >= size
    while outside.any():
        result[outside] = _feistel(result[outside], keys, half_bits, mask)
        outside = result >= size
    return result.astype(np.int64).reshape(np.shape(indices))


def _feistel(values: NDArray[np.uint64], keys: list[np.uint64], half_bits: int, mask: np.uint64) -> NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)  # wraps modulo 2^64, as meant
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


def steps_per_epoch(samples: int, global_batch_size: int, micro_batches: int) -> int:
    """Optimizer steps that use every sample once. A remainder too small to give every micro-batch a sample joins the
    last full batch. `ConfigError` where there are fewer samples than micro-batches."""
    if samples < micro_batches:
        raise ConfigError(
            f"{samples} training samples cannot feed {micro_batches} micro-batches (world_size x "
            "gradient_accumulation_steps): use fewer ranks, less accumulation, or more data"
        )
    full, rest = divmod(samples, global_batch_size)
    return full + (rest >= micro_batches or full == 0)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of one step's global batch."""

    number: int
    """Its place among the step's micro-batches."""
    positions: NDArray[np.int64]
    """Positions of its samples within the training split, shape (b,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Deals the samples of a split to ranks, step by step."""

    samples: int
    global_batch_size: int
    micro_batches: int
    seed: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        steps_per_epoch(self.samples, self.global_batch_size, self.micro_batches)
        if self.world_size > self.micro_batches:
            raise ConfigError(
                f"{self.world_size} ranks share {self.micro_batches} micro-batches (training.world_size x "
                "training.gradient_accumulation_steps), so some would have nothing to do: raise "
                "gradient_accumulation_steps or start fewer ranks"
            )

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.samples, self.global_batch_size, self.micro_batches)

    def batch_range(self, step_in_epoch: int) -> tuple[int, int]:
        """First and last position (exclusive) of a step, in the epoch's order."""
        first = step_in_epoch * self.global_batch_size
        is_last = step_in_epoch == self.steps_per_epoch - 1
        return first, self.samples if is_last else first + self.global_batch_size

    def step(self, epoch: int, step_in_epoch: int) -> tuple[int, list[MicroBatch]]:
        """(samples in the global batch, this rank's micro-batches). Every rank gets at least one, none is empty."""
        return self.steps(epoch, range(step_in_epoch, step_in_epoch + 1))[0]

    def steps(self, epoch: int, steps: range) -> list[tuple[int, list[MicroBatch]]]:
        """`step` for each of these, permuted together: for a few thousand positions that takes little more than for
        a few."""
        numbers = range(self.rank, self.micro_batches, self.world_size)
        batches = [self.batch_range(step) for step in steps]
        edges = [
            [first + (last - first) * edge // self.micro_batches for edge in (number, number + 1)]
            for first, last in batches
            for number in numbers
        ]
        order = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in edges])
        parts = iter(np.split(permute(order, self.samples, self.seed, epoch), np.cumsum(np.diff(edges))[:-1]))
        return [(last - first, [MicroBatch(number, next(parts)) for number in numbers]) for first, last in batches]


def micro_batch_seed(seed: int, step: int, number: int, part: int = 0) -> int:
    """Seed of the random state (dropout) of one micro-batch, or of a part of one, whichever rank computes it."""
    name = f"{seed}/{step}/{number}" + (f"/{part}" if part else "")
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")

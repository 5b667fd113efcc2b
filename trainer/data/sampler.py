"""The assignment of samples to steps and ranks: stateless, and the same steps at any world size.

A place in a training is an epoch and a position in its order, so that the batch may change at any step.

The order of an epoch is a permutation computed on demand (a Feistel network keyed by seed and epoch), so nothing has
to be stored or saved: position p of epoch e is sample ``permutation(p)``, for any rank at any time. Numpy only.

With ``training.shuffle_block`` the permutation has two levels, for datasets that are larger than memory: blocks of
consecutive samples are permuted, and samples are permuted within groups of `GROUP_BLOCKS` blocks. At any moment only
one group is read, and the blocks of the next one are known long before they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.coverage import SAMPLES

_ROUNDS = 6
MIXING = ((0x9E3779B97F4A7C15, 29), (0xBF58476D1CE4E5B9, 32))
"""(factor, shift) by which one half of a position is mixed in each round, after its key."""
GROUP_BLOCKS = 256
"""The number of blocks that are mixed with each other: a batch holds samples from that many places of the dataset."""


def permute(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return where ``indices`` (any shape, values in [0, size)) go under the permutation of this seed and epoch.

    A balanced Feistel network over the next even power of two, walked until it lands inside [0, size) again
    (Black and Rogaway 2002, cycle walking): a bijection without a table, in O(len(indices)).
    """
    half_bits, numbers = permutation_keys(size, seed, epoch)
    mask, keys = np.uint64((1 << half_bits) - 1), [np.uint64(number) for number in numbers]
    values = np.asarray(indices, dtype=np.uint64).ravel()
    result = _feistel(values, keys, half_bits, mask)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        result[outside] = moved = _feistel(result[outside], keys, half_bits, mask)
        outside = outside[moved >= size]
    return result.astype(np.int64).reshape(np.shape(indices))


def permutation_keys(size: int, seed: int, epoch: int) -> tuple[int, list[int]]:
    """Return the bits of each half of a position, and the key of each round, of what `permute` does."""
    digests = (
        hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), digest_size=8).digest() for number in range(_ROUNDS)
    )
    return max(1, ((size - 1).bit_length() + 1) // 2), [int.from_bytes(digest, "big") for digest in digests]


MOST_JUDGED = 1 << 19
"""Windows that are forecast one by one and kept, of a split that has more: what judging takes does not grow with it."""


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The two-level order of one epoch: a bijection of [0, size) onto itself, in blocks of ``block`` samples.

    The blocks are cut at another place in each epoch (``shift``), so that the same neighbours do not always share one.
    What is left over makes a short block, which comes last.
    """

    size: int
    block: int
    seed: int
    epoch: int

    @property
    def group(self) -> int:
        """Samples of a group."""
        return self.block * GROUP_BLOCKS

    @property
    def shift(self) -> int:
        """Sample at which the first block begins; those before it come after the last sample."""
        digest = hashlib.blake2b(f"{self.seed}/{self.epoch}/shift".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.size

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions (n,) of the epoch."""
        mixed = np.empty_like(positions)
        groups = positions // self.group
        for number in np.unique(groups):
            first = int(number) * self.group
            size = min(self.group, self.size - first)
            part = groups == number
            key = int.from_bytes(hashlib.blake2b(f"{self.seed}/group/{number}".encode(), digest_size=7).digest(), "big")
            mixed[part] = first + permute(positions[part] - first, size, key, self.epoch)
        places, within = np.divmod(mixed, self.block)
        return (self._blocks(places) * self.block + within + self.shift) % self.size

    def blocks(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the samples [start, stop) of each block whose place in the order begins in positions [first, last)."""
        places = np.arange(-(-first // self.block), -(-min(last, self.size) // self.block), dtype=np.int64)
        ranges = []
        for block in self._blocks(places).tolist():
            start = block * self.block + self.shift
            stop = min((block + 1) * self.block, self.size) + self.shift
            parts = [(start, min(stop, self.size)), (max(start, self.size) - self.size, stop - self.size)]
            ranges += [(start, stop) for start, stop in parts if stop > start]
        return ranges

    def _blocks(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the block at each place; the short one, if there is one, is at the last."""
        whole = self.size // self.block
        result = places.copy()
        inside = places < whole
        if inside.any():
            result[inside] = permute(places[inside], whole, self.seed, self.epoch)
        return result


def _feistel(values: NDArray[np.uint64], keys: list[np.uint64], half_bits: int, mask: np.uint64) -> NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = right ^ key
        for factor, moved in MIXING:
            mixed *= np.uint64(factor)  # wraps modulo 2^64, as meant
            mixed ^= mixed >> np.uint64(moved)
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right


def spread_positions(count: int, most: int = MOST_JUDGED) -> NDArray[np.int64]:
    """Return positions 0 … count - 1; of more than ``most`` only that many, at even distances."""
    return np.arange(count) if count <= most else np.arange(most) * count // most


class Drawing(Protocol):
    """The interface of an order of samples."""

    @property
    def name(self) -> str:
        """What tells this order from others of the same samples."""
        ...

    @property
    def kind(self) -> str:
        """What is proven of an epoch: `trainer.data.coverage.SAMPLES` or `DRAWS`."""
        ...

    @property
    def depends_on_batch(self) -> bool:
        """Whether the order is another one with global batches of another size."""
        ...

    def samples(self, places: NDArray[np.int64], seed: int, epoch: int, global_batch_size: int) -> NDArray[np.int64]:
        """Return the samples at these places (n,) in the order of an epoch."""
        ...


SMALLEST = 2
"""Samples that each micro-batch of a step has at least where the data allows it: BatchNorm trains on no fewer."""


def steps_per_epoch(samples: int, global_batch_size: int, micro_batches: int) -> int:
    """Return the optimizer steps that use every sample once. A remainder too small to give every micro-batch `SMALLEST`
    samples joins the last full batch. Raise `ConfigError` if there are fewer samples than micro-batches."""
    if samples < micro_batches:
        raise ConfigError(
            f"{samples} training samples cannot feed {micro_batches} micro-batches (world_size x "
            "gradient_accumulation_steps): use fewer ranks, less accumulation, or more data"
        )
    full, rest = divmod(samples, global_batch_size)
    return full + (rest >= SMALLEST * micro_batches or full == 0)


def steps_of(training: DistributedTrainingConfig, samples: int) -> int:
    """Return the optimizer steps of a whole training on so many samples. Raise as `steps_per_epoch` does."""
    steps = training.epochs * steps_per_epoch(samples, training.global_batch_size, training.micro_batches)
    return steps if training.max_steps is None else min(steps, training.max_steps)


def steps_left(samples: int, offset: int, global_batch_size: int, micro_batches: int) -> int:
    """Return the steps from a position of an epoch to its end. Raise `ConfigError` where what is left cannot feed all
    micro-batches, which only another batch size than before can bring about. Pure."""
    left = samples - offset
    if offset and left < min(SMALLEST * micro_batches, global_batch_size):
        raise ConfigError(
            f"{left} samples are left in this epoch, too few for {micro_batches} "
            f"micro-batches (training.world_size x training.gradient_accumulation_steps) of {SMALLEST} each: keep "
            "the previous batch until the next epoch, or use fewer micro-batches"
        )
    return steps_per_epoch(left, global_batch_size, micro_batches)


def cut_evenly(size: int, at_most: int | None, at_least: int) -> list[tuple[int, int]]:
    """Return [start, stop) of the parts in which a micro-batch of this size goes through the model. Pure."""
    count = 1 if at_most is None else max(1, min(-(-size // at_most), size // at_least))
    return list(pairwise(size * edge // count for edge in range(count + 1)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of one step's global batch, or a part of such a part where a whole one would be too much at once."""

    number: int
    """The place among the step's micro-batches."""
    positions: Any
    """Positions of its samples within the training split (b,), int64, or `trainer.data.on_device.Places`."""
    place: int = 0
    """The place among the parts of that micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A sampler that divides the samples of a split among ranks, step by step."""

    samples: int
    global_batch_size: int
    micro_batches: int
    seed: int
    rank: int
    world_size: int
    shuffle_block: int | None = None
    """Samples of a block; None permutes all samples."""
    at_most: int | None = None
    """The most samples that go through the model at once: a micro-batch of more is cut evenly; None cuts none."""
    at_least: int = 1
    """The fewest samples that go through the model at once, which comes before `at_most`."""
    drawing: Drawing | None = None
    """The order of an epoch, where it is another one than a permutation."""

    def __post_init__(self) -> None:
        if self.drawing is not None and self.shuffle_block is not None:
            raise ConfigError(
                "training.shuffle_block reads samples block by block, and sample_weights and lengths want them in "
                "another order: leave it out"
            )
        steps_per_epoch(self.samples, self.global_batch_size, self.micro_batches)
        if self.world_size > self.micro_batches:
            raise ConfigError(
                f"{self.world_size} ranks share {self.micro_batches} micro-batches (training.world_size x "
                "training.gradient_accumulation_steps), so some would have nothing to do: raise "
                "gradient_accumulation_steps or start fewer ranks"
            )

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in a whole epoch."""
        return self.steps_from(0)

    def steps_from(self, offset: int) -> int:
        """Return the number of steps from a position of an epoch to its end. Raise `ConfigError` as `steps_left`."""
        return steps_left(self.samples, offset, self.global_batch_size, self.micro_batches)

    def steps_to_do(self, epoch: int, offset: int, epochs: int) -> int:
        """Return the number of steps from a position of an epoch to the end of ``epochs`` epochs."""
        return 0 if epoch >= epochs else self.steps_from(offset) + (epochs - epoch - 1) * self.steps_per_epoch

    def batch_range(self, offset: int, number: int) -> tuple[int, int]:
        """Return the first and last position (exclusive), in the epoch's order, of a step. ``number``: its number,
        from 0, among those from position ``offset`` on."""
        first = offset + number * self.global_batch_size
        is_last = number == self.steps_from(offset) - 1
        return first, self.samples if is_last else first + self.global_batch_size

    def step(self, epoch: int, offset: int) -> tuple[int, list[MicroBatch]]:
        """Return (samples in the global batch, this rank's micro-batches) of the step that begins at a position of an
        epoch."""
        return self.steps(epoch, offset, range(1))[0]

    def steps(self, epoch: int, offset: int, numbers: range) -> list[tuple[int, list[MicroBatch]]]:
        """Return `step` for each of these, which `batch_range` numbers. Every rank gets at least one micro-batch, and
        none is empty. They are permuted together: for a few thousand positions that takes little more than for a
        few."""
        cuts = self.cuts(offset, numbers)
        batches = [self.batch_range(offset, number) for number in numbers]
        order = np.concatenate([np.arange(start, stop, dtype=np.int64) for cut in cuts for *_, start, stop in cut])
        sizes = [stop - start for cut in cuts for *_, start, stop in cut]
        parts = iter(np.split(self.order(epoch, order), np.cumsum(sizes)[:-1]))
        return [
            (last - first, [MicroBatch(part, next(parts), place) for part, place, *_ in cut])
            for (first, last), cut in zip(batches, cuts, strict=True)
        ]

    def cuts(self, offset: int, numbers: range) -> list[list[tuple[int, int, int, int]]]:
        """Return this rank's micro-batches of each of these steps, as (number, place, first, last): its samples are at
        places [first, last) in the order of the epoch."""
        parts_of_rank = range(self.rank, self.micro_batches, self.world_size)
        return [
            [
                (part, place, start, stop)
                for part in parts_of_rank
                for place, (start, stop) in enumerate(self._cut(*self.batch_range(offset, number), part))
            ]
            for number in numbers
        ]

    def _cut(self, first: int, last: int, part: int) -> list[tuple[int, int]]:
        """Return the positions [start, stop) of each part of a micro-batch of the global batch [first, last)."""
        begin, end = (first + (last - first) * edge // self.micro_batches for edge in (part, part + 1))
        return [(begin + start, begin + stop) for start, stop in cut_evenly(end - begin, self.at_most, self.at_least)]

    def together(self, offset: int, planned: int) -> Iterator[range]:
        """Yield the numbers of all steps from a position of an epoch on, as many at once as hold about ``planned``
        samples of this rank."""
        count, last = max(1, planned * self.world_size // self.global_batch_size), self.steps_from(offset)
        return (range(first, min(first + count, last)) for first in range(0, last, count))

    def ahead(self, epoch: int, offset: int, number: int, is_first: bool = False) -> list[tuple[int, int]]:
        """Return ranges of samples [start, stop) to be read into memory while this step is gathered: its share of the
        blocks of the next group, and for the first step of an interval the rest of its own group as well. The list is
        empty without blocks, as any sample may be next."""
        if self.shuffle_block is None:
            return []
        order = BlockOrder(self.samples, self.shuffle_block, self.seed, epoch)
        first, last = self.batch_range(offset, number)
        from_here = first // order.group * order.group if is_first else first + order.group
        return order.blocks(from_here, last + order.group)

    @property
    def kind(self) -> str:
        """What is proven of an epoch (`trainer.data.coverage`)."""
        return SAMPLES if self.drawing is None else self.drawing.kind

    def order(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these places in the order of an epoch, as positions within the split."""
        if self.drawing is not None:
            return self.drawing.samples(positions, self.seed, epoch, self.global_batch_size)
        if self.shuffle_block is None:
            return permute(positions, self.samples, self.seed, epoch)
        return BlockOrder(self.samples, self.shuffle_block, self.seed, epoch).samples(positions)


def micro_batch_seed(seed: int, step: int, number: int, part: int = 0) -> int:
    """Return the seed of the random state (dropout) of one micro-batch, or of a part of one, whichever rank computes
    it."""
    name = f"{seed}/{step}/{number}" + (f"/{part}" if part else "")
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")

"""Digests of the samples used: small enough for each all-reduce, strong enough to prove that none was left out.

Every sample has a hash; those of a step are summed modulo 2^64 over all ranks together with their number, in the very
all-reduce that commits the step. Over an epoch the sums must be those of 0 … n - 1, each once: they are computed from
n alone, without the sampler, so a sampler that deals a sample twice cannot hide it (a chance of 2^-64 left aside).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 20
GOLDEN, MIXERS, SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)
"""The numbers of SplitMix64, whose finaliser is the hash of a sample."""


def digest_samples(samples: NDArray[np.int64]) -> int:
    """Return the sum of the samples' hashes modulo 2^64, as a signed 64-bit number: sums of digests, wrapping, are
    digests."""
    return digests(samples, np.zeros(1, dtype=np.int64))[0] if len(samples) else 0


def digests(samples: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    """Return the digest (`digest_samples`) of each part of ``samples``. Parts begin at ``starts``; none is empty."""
    values = np.asarray(samples, dtype=np.uint64) + np.uint64(GOLDEN)
    for shift, factor in zip(SHIFTS, MIXERS, strict=False):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    values ^= values >> np.uint64(SHIFTS[-1])
    return np.add.reduceat(values, starts).astype(np.int64).tolist()


def add(one: int, other: int) -> int:
    """Return the sum of two digests."""
    return (one + other + 2**63) % 2**64 - 2**63


def digest_of_all(count: int) -> int:
    """Return the digest of 0 … count - 1, each once."""
    total = 0
    for first in range(0, count, _BLOCK):
        total = add(total, digest_samples(np.arange(first, min(first + _BLOCK, count), dtype=np.int64)))
    return total


@dataclass(slots=True)
class EpochCoverage:
    """The number and the digest of the samples that committed steps used in one epoch."""

    epoch: int
    samples: int = 0
    digest: int = 0


def find_coverage_errors(epochs: list[dict[str, Any]], count: int, whole_epochs: int) -> list[str]:
    """Return what is wrong with the records of a training over ``count`` samples that finished ``whole_epochs`` epochs,
    one sentence for each fault, none if every sample was used exactly once per epoch. An epoch that was cut short (by
    ``max_steps`` or early stopping) is judged by its number of samples only, which must not exceed ``count``. Records
    count epochs from 0, the sentences from 1. Pure."""
    expected = digest_of_all(count)
    found = {item["epoch"]: item for item in epochs}
    wrong = [f"epoch {epoch + 1}: nothing was recorded" for epoch in range(whole_epochs) if epoch not in found]
    for epoch, item in sorted(found.items()):
        if item["samples"] > count or (epoch < whole_epochs and item["samples"] != count):
            wrong.append(f"epoch {epoch + 1}: {item['samples']} samples were used, the split has {count}")
        elif epoch < whole_epochs and item["digest"] != expected:
            wrong.append(f"epoch {epoch + 1}: {count} samples were used, but not each exactly once")
    if len(found) != len(epochs):
        wrong.append("an epoch was recorded twice")
    return wrong

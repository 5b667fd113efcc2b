"""Every sample once: what proves it, and what would be noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.data.coverage import add, digest_of_all, digest_samples, find_coverage_errors
from trainer.data.sampler import SMALLEST, Sampler

counts = st.integers(1, 300)


def splitmix64(state: int) -> int:
    """The generator's first number, as Steele, Lea and Flood (2014) write it down."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def of(samples: list[int]) -> int:
    return digest_samples(np.array(samples, dtype=np.int64))


def record(samples: list[int], epoch: int = 0) -> dict[str, Any]:
    return {"epoch": epoch, "samples": len(samples), "digest": of(samples)}


@given(st.lists(st.integers(0, 2**62), max_size=20))
def test_a_digest_is_the_wrapping_sum_of_splitmix64(samples: list[int]) -> None:
    found = of(samples)
    assert found % 2**64 == sum(splitmix64(sample) for sample in samples) % 2**64
    assert -(2**63) <= found < 2**63, "it fits into an int64 tensor"


@given(st.lists(st.integers(0, 2**40), min_size=1), st.integers(0, 2**32), st.integers(1, 5))
def test_however_samples_are_split_among_ranks_and_steps_the_sum_is_the_same(
    samples: list[int], seed: int, ranks: int
) -> None:
    dealt = np.random.default_rng(seed).permutation(samples)
    total = 0
    for rank in range(ranks):
        total = add(total, digest_samples(dealt[rank::ranks]))
    assert total == of(samples)


@given(counts, st.data())
def test_a_sample_that_is_skipped_doubled_or_swapped_is_noticed(count: int, data: st.DataObject) -> None:
    samples = list(range(count))
    assert find_coverage_errors([record(samples)], count, 1) == []
    one, other = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count + 5))
    skipped = samples[:one] + samples[one + 1 :]
    if skipped:
        [said] = find_coverage_errors([record(skipped)], count, 1)
        assert said == f"epoch 1: {count - 1} samples were used, the split has {count}"
    [said] = find_coverage_errors([record([*samples, one])], count, 1)
    assert said == f"epoch 1: {count + 1} samples were used, the split has {count}"
    if one != other:
        [said] = find_coverage_errors([record([*skipped, other])], count, 1)
        assert said == f"epoch 1: {count} samples were used, but not each exactly once"


def test_all_means_each_once_beyond_one_block() -> None:
    count = (1 << 20) + 3
    assert digest_of_all(count) == digest_samples(np.arange(count))
    assert digest_of_all(0) == 0
    assert len({digest_of_all(count) for count in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("records", "whole_epochs", "said"),
    [
        ([record([*range(9)], 0), record([*range(9)], 1)], 2, []),
        ([record([*range(9)], 1)], 2, ["epoch 1: nothing was recorded"]),
        ([record([*range(9)], 0), record([3, 4], 1)], 1, []),  # cut short
        ([record([*range(9)], 0), record([3] * 10, 1)], 1, ["epoch 2: 10 samples were used, the split has 9"]),
        ([record([*range(9)]), record([*range(9)])], 1, ["an epoch was recorded twice"]),
    ],
)
def test_what_is_said_of_records(records: list[dict[str, Any]], whole_epochs: int, said: list[str]) -> None:
    assert find_coverage_errors(records, 9, whole_epochs) == said


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32), st.data())
def test_the_sampler_is_proven_though_world_and_batch_change_in_every_step(
    samples: int, batch: int, micro_batches: int, seed: int, data: st.DataObject
) -> None:
    """Steps are done by worlds of any size, with any batch; the digests of all add up to those of an epoch."""
    used, total = 0, 0
    while used < samples:
        world = data.draw(st.integers(1, micro_batches))
        size = micro_batches * data.draw(st.integers(1, batch))
        try:
            ranks = [
                Sampler(
                    samples=samples,
                    global_batch_size=size,
                    micro_batches=micro_batches,
                    seed=seed,
                    rank=rank,
                    world_size=world,
                )
                for rank in range(world)
            ]
            dealt = [rank.step(3, used)[1] for rank in ranks]
        except ConfigError:
            assert samples - used < min(SMALLEST * micro_batches, size)
            return
        for micro_batch in (part for parts in dealt for part in parts):
            used += len(micro_batch.positions)
            total = add(total, digest_samples(micro_batch.positions))
    assert find_coverage_errors([{"epoch": 0, "samples": used, "digest": total}], samples, 1) == []

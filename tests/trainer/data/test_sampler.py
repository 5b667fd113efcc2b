from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.data.coverage import add, digest_of_all, digest_samples, find_coverage_errors
from trainer.data.sampler import GROUP_BLOCKS, SMALLEST, BlockOrder, Sampler, micro_batch_seed, permute, steps_per_epoch

blocks = st.none() | st.integers(1, 700)


def sampler(
    samples: int, batch: int, micro: int, rank: int = 0, world: int = 1, seed: int = 0, block: int | None = None
) -> Sampler:
    return Sampler(
        samples=samples,
        global_batch_size=batch * micro,
        micro_batches=micro,
        seed=seed,
        rank=rank,
        world_size=world,
        shuffle_block=block,
    )


def dealt(
    samples: int, batch: int, micro: int, world: int, epoch: int = 0, block: int | None = None
) -> list[dict[int, list[int]]]:
    """For every step of an epoch: micro-batch number -> positions, over all ranks."""
    ranks = [sampler(samples, batch, micro, rank, world, block=block) for rank in range(world)]
    steps = []
    for step in range(ranks[0].steps_per_epoch):
        found: dict[int, list[int]] = {}
        for rank in ranks:
            count, mine = rank.step(epoch, step * batch * micro)
            assert mine, "a rank without work would leave its peers waiting"
            for part in mine:
                assert part.number not in found
                found[part.number] = part.positions.tolist()
        assert count == sum(map(len, found.values()))
        assert all(found.values()), "an empty micro-batch has no mean"
        steps.append(found)
    return steps


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_the_order_of_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))
    one = size // 2
    assert permute(np.array([one]), size, seed, epoch) == order[one], "a position does not depend on its neighbours"


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, int]:
    micro = draw(st.integers(1, 8))
    return draw(st.integers(micro, 600)), draw(st.integers(1, 40)), micro


@given(plan=plans(), epoch=st.integers(0, 3), block=blocks, world=st.integers(2, 8))
def test_every_sample_counts_once_per_epoch_and_the_world_size_does_not_matter(
    plan: tuple[int, int, int], epoch: int, block: int | None, world: int
) -> None:
    samples, batch, micro = plan
    alone = dealt(samples, batch, micro, 1, epoch, block)
    assert sorted(p for step in alone for part in step.values() for p in part) == list(range(samples))
    assert dealt(samples, batch, micro, min(world, micro), epoch, block) == alone


block_orders = st.builds(
    BlockOrder, size=st.integers(1, 4000), block=st.integers(1, 9), seed=st.integers(0, 2**40), epoch=st.integers(0, 50)
)


def samples_in(ranges: list[tuple[int, int]]) -> set[int]:
    return {sample for start, stop in ranges for sample in range(start, stop)}


@given(order=block_orders)
def test_with_blocks_a_group_of_positions_is_a_group_of_blocks(order: BlockOrder) -> None:
    """A permutation, in which whatever is read at a time lies in so many segments of the dataset."""
    positions = np.arange(order.size)
    samples = order.samples(positions)
    assert np.array_equal(np.sort(samples), positions)
    one = order.size // 2
    assert order.samples(np.array([one])) == samples[one], "a position does not depend on its neighbours"
    for first in range(0, order.size, order.group):
        ranges = order.blocks(first, first + order.group)
        assert samples_in(ranges) == set(samples[first : first + order.group].tolist())
        assert len(ranges) <= GROUP_BLOCKS + 1, "one may go past the last sample and on from the first"


@given(plan=plans(), block=st.integers(1, 3), epoch=st.integers(0, 3), data=st.data())
def test_what_a_step_reads_was_announced_and_little_more(
    plan: tuple[int, int, int], block: int, epoch: int, data: st.DataObject
) -> None:
    """From whichever step an epoch is resumed."""
    samples, batch, micro = 4 * plan[0], 10 + plan[1], plan[2]
    one = sampler(samples, batch, micro, block=block)
    group = block * GROUP_BLOCKS
    start = data.draw(st.integers(0, one.steps_per_epoch - 1))
    announced: set[int] = set()
    for step in range(start, one.steps_per_epoch):
        new = samples_in(one.ahead(epoch, 0, step, is_first=step == start))
        assert not new & announced, "once is enough"
        announced |= new
        _, parts = one.step(epoch, step * batch * micro)
        read = {position for part in parts for position in part.positions.tolist()}
        assert read <= announced
        begun = one.batch_range(0, start)[0] // group * group
        assert len(announced) <= one.batch_range(0, step)[1] - begun + group + block
    assert sampler(samples, batch, micro).ahead(epoch, 0, start) == []


def test_blocks_of_one_epoch_are_cut_elsewhere_in_the_next() -> None:
    """Neighbours that share a block in one epoch are apart in another, and near and far blocks are mixed."""
    first, second = (BlockOrder(1_000_000, 1000, 0, epoch) for epoch in (0, 1))
    assert first.shift % 1000 != second.shift % 1000
    samples = first.samples(np.arange(1024))
    assert abs(np.corrcoef(np.arange(1024), samples)[0, 1]) < 0.1
    assert len(np.unique((samples - first.shift) // 1000)) > 200
    assert not np.array_equal(samples, second.samples(np.arange(1024)))


@given(plan=plans())
def test_only_the_last_step_differs_from_the_global_batch(plan: tuple[int, int, int]) -> None:
    samples, batch, micro = plan
    one = sampler(samples, batch, micro)
    counts = [last - first for first, last in (one.batch_range(0, step) for step in range(one.steps_per_epoch))]
    assert set(counts[:-1]) <= {batch * micro}
    assert micro <= counts[-1] < batch * micro + 2 * micro


def test_a_remainder_too_small_for_all_micro_batches_joins_the_last_batch() -> None:
    assert steps_per_epoch(24, 12, 3) == 2
    assert steps_per_epoch(26, 12, 3) == 2, "2 samples cannot feed 3 micro-batches"
    assert steps_per_epoch(29, 12, 3) == 2, "nor would BatchNorm train on one of them"
    assert steps_per_epoch(30, 12, 3) == 3
    assert steps_per_epoch(5, 12, 3) == 1
    assert sampler(26, 4, 3).batch_range(0, 1) == (12, 26)
    assert sampler(26, 4, 3).batch_range(6, 0) == (6, 18), "from another place"
    assert sampler(26, 4, 3).batch_range(6, 1) == (18, 26)


@given(plan=plans(), most=st.integers(1, 40), least=st.integers(1, 3), rank=st.integers(0, 7))
def test_a_micro_batch_that_is_too_much_at_once_is_cut_evenly(
    plan: tuple[int, int, int], most: int, least: int, rank: int
) -> None:
    """And not into parts of fewer samples than a model can train on, where it has as many."""
    samples, batch, micro = plan
    whole = sampler(samples, batch, micro, rank % micro, micro)
    cut = replace(whole, at_most=most, at_least=least)
    offset = 0
    while offset < samples:
        count, [one] = whole.step(3, offset)
        same, parts = cut.step(3, offset)
        assert count == same
        assert np.array_equal(np.concatenate([part.positions for part in parts]), one.positions)
        assert [(part.number, part.place) for part in parts] == [(one.number, place) for place in range(len(parts))]
        sizes = [len(part.positions) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= min(least, len(one.positions))
        assert max(sizes) <= most or len(one.positions) < least * -(-len(one.positions) // most)
        offset += count


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = {
        tuple(permute(np.arange(500), 500, seed, epoch).tolist()) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    }
    assert len(orders) == 4
    fixed = np.mean(permute(np.arange(5000), 5000, 0, 0) == np.arange(5000))
    assert fixed < 0.01


def test_neighbours_are_spread_over_the_whole_split() -> None:
    order = permute(np.arange(100_000), 100_000, 3, 0)
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    assert 45_000 < order[:1000].mean() < 55_000


def test_dropout_seeds_are_the_micro_batchs_own() -> None:
    seeds = {micro_batch_seed(seed, step, number) for seed in range(3) for step in range(50) for number in range(6)}
    assert len(seeds) == 900


def test_too_few_samples_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"5 training samples cannot feed 6 micro-batches.*fewer ranks.*more data"):
        sampler(5, 4, 6)


def test_a_rank_too_many_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks share 3 micro-batches.*gradient_accumulation_steps or start fewer"):
        sampler(100, 4, 3, rank=0, world=4)


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
            ranks = [sampler(samples, size // micro_batches, micro_batches, rank, world, seed) for rank in range(world)]
            dealt = [rank.step(3, used)[1] for rank in ranks]
        except ConfigError:
            assert samples - used < min(SMALLEST * micro_batches, size)
            return
        for micro_batch in (part for parts in dealt for part in parts):
            used += len(micro_batch.positions)
            total = add(total, digest_samples(micro_batch.positions))
    assert find_coverage_errors([{"epoch": 0, "samples": used, "digest": total}], samples, 1) == []

"""Batches: gathered in the step, by a thread, or from a copy of the data; always the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.coverage import digest_samples
from trainer.data.loader import PLANNED, ArrayReader, BatchLoader, batches_ahead, fits_on_device
from trainer.data.on_device import DeviceOrder
from trainer.data.sampler import Sampler, permute
from trainer.data.shards import DataShardManager
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def sampler(shards: DataShardManager, batch: int = 240) -> Sampler:
    return Sampler(
        samples=shards.count("train"), global_batch_size=batch, micro_batches=6, seed=1, rank=1, world_size=2
    )


def loader(shards: DataShardManager, ahead: int = 0) -> BatchLoader:
    reader = shards.make_reader(CPU, ahead)
    return BatchLoader(reader, sampler(shards), CPU, Faults({}, 0), StepTimer(True, CPU))


@pytest.mark.parametrize("way", ["step", "thread", "far ahead", "resident", "ordered there"])
def test_batches_are_those_that_the_sampler_deals(way: str, dataset: Path, cache: Path) -> None:
    shards = DataShardManager(str(dataset), cache)
    plain = DataShardManager(str(dataset), cache)
    if way in ("resident", "ordered there"):
        shards.keep_on(CPU)
        assert shards._flat.data_ptr() != plain._flat.data_ptr()
        assert not np.shares_memory(shards._flat.numpy(), shards._maps["features"])
    made = loader(shards, {"thread": 1, "far ahead": 4}.get(way, 0))
    if way == "ordered there":
        assert isinstance(made.reader, ArrayReader)
        made.reader.order_device = CPU
    for first in (0, 3):  # a step that failed begins anew, with batches under way
        batches = made.batches(2, 240 * first, first)
        for step in range(first, made.sampler.steps_per_epoch):
            found = next(batches)
            samples, dealt = made.sampler.step(2, 240 * step)
            assert found.samples == samples
            assert found.digest == digest_samples(np.concatenate([part.positions for part in dealt]))
            for read, part in zip(found.micro_batches, dealt, strict=True):
                number, (windows, target) = read.number, read.data
                expected = plain.gather(plain.end_rows("train", part.positions))
                assert number == part.number
                assert [read.positions[place] for place in range(read.count)] == part.positions.tolist()
                assert torch.equal(windows, expected[0])
                assert torch.equal(target, expected[1])
            if first == 0 and step == 5:
                break
        else:
            assert next(batches, None) is None
    made.close()


def test_steps_are_planned_together_and_come_out_as_one_by_one(dataset: Path, cache: Path) -> None:
    shards = DataShardManager(str(dataset), cache)
    deals = sampler(shards, 60)
    together = deals.steps(3, 60, range(1, deals.steps_per_epoch - 1))
    assert len(together) * 30 < PLANNED
    for step, (samples, dealt) in enumerate(together, start=2):
        expected_samples, expected = deals.step(3, 60 * step)
        assert samples == expected_samples
        for one, other in zip(dealt, expected, strict=True):
            assert one.number == other.number
            assert np.array_equal(one.positions, other.positions)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, 1024, 98_304])
def test_an_order_on_the_device_is_that_of_the_host(size: int) -> None:
    for seed, epoch in ((0, 0), (7, 3)):
        found = DeviceOrder.of_epoch(size, seed, epoch, CPU)
        places = np.arange(size, dtype=np.int64)
        expected = permute(places, size, seed, epoch)
        assert np.array_equal(found.samples.numpy(), expected)
        cuts = np.unique([0, size // 3, size // 2, size])
        parts = list(pairwise(cuts.tolist()))
        assert found.digests(cuts[:-1], cuts[1:]) == [digest_samples(expected[first:last]) for first, last in parts]


def test_what_is_gathered_ahead_and_what_fits() -> None:
    assert batches_ahead(None, CPU, resident=False, larger_than_memory=False) == 0
    assert batches_ahead(None, CPU, resident=False, larger_than_memory=True) == 1
    assert batches_ahead(None, GPU, resident=False, larger_than_memory=False) == 1
    assert batches_ahead(3, CPU, resident=False, larger_than_memory=False) == 3
    assert batches_ahead(3, GPU, resident=True, larger_than_memory=False) == 0
    assert fits_on_device(250, 1000)
    assert not fits_on_device(251, 1000)

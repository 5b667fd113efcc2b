"""Copies to a device beside its computation, on a stand-in with two streams, whose copies come as late or as early as
the order of work allows, and whose memory is used again as soon as it may be."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.comm.launcher_env import RankFacts
from trainer.config import DistributedTrainingConfig
from trainer.data.dataset_data import DatasetData, DatasetReader
from trainer.data.loader import ArrayReader, BatchLoader
from trainer.data.on_device import DeviceCopies
from trainer.data.sampler import Sampler
from trainer.data.shards import DataShardManager
from trainer.data.torch_loader import ReadOptions
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

CPU = torch.device("cpu")
FILL = -77
"""What memory holds before something is copied there."""


@dataclass
class TwoStreams:
    """A `trainer.data.on_device.CopyStream`: work is done when it is due, copies late or early."""

    early: bool
    copies: list[Callable[[], None]] = field(default_factory=list)
    computing: list[Callable[[], None]] = field(default_factory=list)
    free: list[Any] = field(default_factory=list)
    kept: dict[int, bool] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """The number of each copy by where it is."""
    local: threading.local = field(default_factory=threading.local)
    log: list[str] = field(default_factory=list)
    made: int = 0
    places: int = 0

    @contextmanager
    def beside(self) -> Iterator[None]:
        assert not self.is_beside
        self.local.is_beside = True
        yield
        self.local.is_beside = False

    @property
    def is_beside(self) -> bool:
        return getattr(self.local, "is_beside", False)

    def copy(self, part: Tensor) -> Tensor:
        assert self.is_beside
        values = part.clone().numpy()
        fits = [each for each in self.free if (each.shape, each.dtype) == (values.shape, values.dtype)]
        if fits:
            memory = fits[0]
            self.free = [each for each in self.free if each is not memory]
        else:
            memory = np.full_like(values, FILL)
            self.places += 1
        own = memory[...]  # is gone when no tensor uses it any more
        self.made += 1
        weakref.finalize(own, self._give_back, memory, self.made)
        found = torch.from_numpy(own)
        self.kept[self.made] = False
        self.numbers[found.data_ptr()] = self.made
        self.log.append("copy")

        def work() -> None:
            memory[...] = values

        self.copies.append(work)
        if self.early:
            self._copy_all()
        return found

    def record(self) -> Any:
        assert self.is_beside
        return len(self.copies)

    def follow(self, event: Any) -> None:
        assert not self.is_beside
        self.log.append("follow")
        self.compute(partial(self._copy_all, event))

    def keep(self, part: Tensor) -> None:
        self.kept[self.numbers[part.data_ptr()]] = True

    def compute(self, work: Callable[[], None]) -> None:
        """Submit work of the computation."""
        self.computing.append(work)

    def finish(self) -> None:
        """Do all work that was submitted, that of the computation first."""
        while self.computing:
            self.computing.pop(0)()
        self._copy_all()

    def _copy_all(self, until: int | None = None) -> None:
        for place, work in enumerate(self.copies[:until]):
            work()
            self.copies[place] = _nothing

    def _give_back(self, memory: Any, number: int) -> None:
        if self.kept.pop(number):
            self.compute(partial(self.free.append, memory))
        else:
            self.free.append(memory)


def _nothing() -> None:
    return


def total_of(batches: Iterator[Any], device: TwoStreams) -> list[float]:
    """Return the sum over each batch, as the computation of the device finds it."""
    sums: list[Tensor] = []
    for batch in batches:
        into = torch.zeros(1, dtype=torch.float64)
        sums.append(into)
        _submit_sum(device, batch, into)
        del batch
    device.finish()
    return [each.item() for each in sums]


def _submit_sum(device: TwoStreams, batch: Any, into: Tensor) -> None:
    parts = [part.numpy().__array_interface__ for part in batch]

    def work() -> None:  # by address, as a kernel reads: it keeps no tensor alive
        for each in parts:
            into.add_(float(np.asarray(_At(each)).sum(dtype=np.float64)))

    device.compute(work)


class _At:
    def __init__(self, where: Any) -> None:
        self.__array_interface__ = where


BATCHES = [[torch.full((4, 3), float(number)), torch.arange(4) + number] for number in range(1, 8)]
SUMS = [12.0 * number + 6 + 4 * number for number in range(1, 8)]


@pytest.mark.parametrize("early", [True, False])
def test_the_computation_reads_each_batch_after_its_copy_and_before_the_next_one_takes_its_memory(early: bool) -> None:
    device = TwoStreams(early)
    assert total_of(DeviceCopies(device).ahead(iter(BATCHES)), device) == SUMS


def test_each_copy_is_submitted_before_the_batch_that_it_follows_is_used() -> None:
    device = TwoStreams(True)
    for number, _ in enumerate(DeviceCopies(device).ahead(iter(BATCHES))):
        device.log.append(f"use {number}")
    copies = ["copy", "copy"]
    middle = [item for number in range(6) for item in [*copies, "follow", f"use {number}"]]
    assert device.log == [*copies, *middle, "follow", "use 6"]


def test_memory_of_what_was_used_is_used_again() -> None:
    device = TwoStreams(True)
    for batch in DeviceCopies(device).ahead(iter(BATCHES)):
        _submit_sum(device, batch, torch.zeros(1, dtype=torch.float64))
        del batch
        device.finish()
    assert device.places < len(device.log), "a batch's memory was never given back"
    assert device.places <= 6


@dataclass
class Pair:
    inputs: Tensor
    name: str


class Moved:
    """An object that moves itself, whose memory nobody else knows."""

    def to(self, device: torch.device) -> Moved:
        raise AssertionError("this is for the step")


def test_what_is_no_plain_tensor_of_the_host_stays_and_structures_are_those_of_before() -> None:
    device = TwoStreams(True)
    odd, sparse = Moved(), torch.eye(2).to_sparse()
    one = torch.nn.Parameter(torch.ones(2))
    batch = {"pair": Pair(torch.ones(2), "a"), "rest": [odd, sparse, 3, "text", one]}
    copies = DeviceCopies(device)
    found = copies.take(copies.start(batch))
    assert device.made == 1
    assert isinstance(found["pair"], Pair)
    assert found["pair"].name == "a"
    assert found["pair"].inputs is not batch["pair"].inputs
    assert torch.equal(found["pair"].inputs, torch.ones(2))
    assert all(mine is its for mine, its in zip(found["rest"], batch["rest"], strict=True))


class Numbers(Dataset[Any]):
    """Samples that tell their position, and are changed by chance."""

    reads = 0
    """In this process."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return torch.full((2, 2), float(position)) + torch.rand(1).round(), torch.tensor(position)


def sampler(samples: int) -> Sampler:
    return Sampler(samples=samples, global_batch_size=12, micro_batches=4, seed=1, rank=1, world_size=2)


def all_batches(reader: Any, samples: int, device: TwoStreams | None) -> list[Any]:
    """Return each step's digest, and the sum over its batch, of an epoch that begins anew in its middle."""
    loader = BatchLoader(reader, sampler(samples), CPU, Faults({}, 0), StepTimer(True, CPU))
    found: list[tuple[int, Tensor]] = []
    for first, stop in ((0, 2), (1, 99)):
        for number, batch in enumerate(loader.batches(0, 12 * first, first)):
            into = torch.zeros(1, dtype=torch.float64)
            found.append((batch.digest, into))
            for part in batch.micro_batches:
                if device is None:
                    into += sum(float(each.double().sum()) for each in part.data)
                else:
                    _submit_sum(device, part.data, into)
            del batch, part
            if number + 1 == stop:
                break
    if device is not None:
        device.finish()
    loader.close()
    return [(digest, round(into.item(), 6)) for digest, into in found]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dataset_gives_the_same_batches_by_copies_beside_the_computation(workers: int, early: bool) -> None:
    def batches(device: TwoStreams | None) -> list[Any]:
        options = ReadOptions(num_workers=workers, multiprocessing_context="fork" if workers else None)
        data = DatasetData(Numbers(), options={"train": options})
        if workers:
            data.start_workers(DistributedTrainingConfig(world_size=1), RankFacts())
        reader = data.make_reader(CPU, None)
        assert isinstance(reader, DatasetReader)
        assert reader.copies is None
        copies = None if device is None else DeviceCopies(device)
        try:
            return all_batches(DatasetReader(reader.pool, reader.before_epoch, copies), 50, device)
        finally:
            data.close()

    device = TwoStreams(early)
    assert batches(device) == batches(None)
    assert device.made >= 2 * 2 * 6, "two tensors, of two micro-batches"


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_gets_its_batches_by_the_same_copies(
    workers: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ReadOptions(num_workers=workers, multiprocessing_context="fork" if workers else None)
    split = Numbers()
    data = DatasetData(Numbers(), valid=split, options={"valid": options})
    if workers:
        data.start_workers(DistributedTrainingConfig(world_size=1, batch_size_per_gpu=4), RankFacts())
    parts, device = [np.arange(start, start + 8) for start in range(0, 48, 8)], TwoStreams(early)
    try:
        usual = [sum(float(part.double().sum()) for part in batch) for batch in data.read_each("valid", parts, CPU)]
        monkeypatch.setattr("trainer.data.dataset_data.copies_to", lambda _: DeviceCopies(device))
        assert total_of(data.read_each("valid", parts, CPU), device) == usual
    finally:
        data.close()
    assert device.made == 2 * len(parts)
    assert split.reads == (0 if workers else 2 * 48)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("ahead", [0, 2])
def test_arrays_give_the_same_batches_by_the_same_copies(ahead: int, early: bool, dataset: Path, cache: Path) -> None:
    def batches(device: TwoStreams | None) -> list[Any]:
        shards = DataShardManager(str(dataset), cache)
        reader = shards.make_reader(CPU, ahead)
        assert isinstance(reader, ArrayReader)
        assert reader.copies is None
        reader.copies = None if device is None else DeviceCopies(device)
        return all_batches(reader, 50, device)

    assert batches(TwoStreams(early)) == batches(None)

"""`TrainingData` and `BatchLoader`: what a training needs of its data, of whatever kind, and the batches of its steps.

Which samples belong to the next few steps is worked out for all of them together. What reads them is a `Reader`: of
arrays of this node `ArrayReader`, of a user's datasets `trainer.data.dataset_data`. Arrays are read in one of three
ways:

- On a CPU, samples are gathered from the memory map by the step itself. A thread that does it ahead shares the rank's
  core, and every hand-over between the two costs more than the gather (`batches_ahead`).
- Where the data fit into the GPU's memory and are kept there (`fits_on_device`), a batch is one kernel.
- Else a thread gathers, and copies batches to the GPU while that computes (`trainer.data.on_device`).

The two ways of a GPU have not been run on a GPU yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.batches import Batch, Samples, move_to
from trainer.data.coverage import DRAWS, add, digests
from trainer.data.sampler import Drawing, MicroBatch, Sampler
from trainer.runtime.fault_injection import Faults
from trainer.runtime.packages import load
from trainer.runtime.step_timer import StepTimer

if TYPE_CHECKING:
    from trainer.data.on_device import DeviceCopies, DeviceOrder

CUDA_COPIES, COPIES = "trainer.data.on_device:CudaCopyStream", "trainer.data.on_device:DeviceCopies"
DEVICE_ORDER, PLACES = "trainer.data.on_device:DeviceOrder", "trainer.data.on_device:Places"
PLANNED = 1 << 13
"""Samples of this rank that are worked out together, about."""
PLANNED_PLACES = 1 << 10
"""Steps that are worked out together where samples are places in an order on the device."""
MANY = 1 << 40
"""What is counted of a stream: more than any batch."""
RESIDENT_SHARE = 0.25
"""The share of a GPU's free memory that the data may take: the model, its gradients and activations come after it."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The samples of a step, before they are read."""

    step: int
    """The steps done by then, over all epochs."""
    seed: int
    """The seed of the training."""
    samples: int
    """In the global batch, over all ranks."""
    parts: list[MicroBatch]
    digest: int
    ahead: list[tuple[int, int]]
    """Samples [first, last) that the kernel may read meanwhile."""
    order: DeviceOrder | None = None
    """The order of the epoch, where the device has it: then positions are `trainer.data.on_device.Places` in it."""


class Reader(Protocol):
    """The interface of what reads the samples of steps."""

    @property
    def order_device(self) -> torch.device | None:
        """Where it wants the order of an epoch: the device that holds the data; None: it wants positions."""
        ...

    def read(self, steps: Iterator[PlannedStep]) -> Iterator[Sequence[Any]]:
        """Yield the data of the micro-batches of each step. It may take several steps before it yields the first."""
        ...

    def close(self) -> None:
        """End what reads ahead."""
        ...


class Loader(Protocol):
    """The interface of what gives the batches of one rank in one world."""

    def batches(self, epoch: int, offset: int, step: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from position ``offset`` of it on. ``step``: the optimizer steps that are done
        by then, over all epochs."""
        ...

    def close(self) -> None:
        """End what reads ahead."""
        ...


class TrainingData(ABC):
    """A dataset with the splits ``train``, ``valid`` and ``test``, of which the last two may be empty."""

    drawing: Drawing | None = None
    """The order of the training samples, where it is another one than a permutation."""
    substreams: int = 0
    """Of training samples that are a stream, the number of its sub-streams: then nobody knows how many samples there
    are, and `count` says `MANY`."""

    @property
    def attached(self) -> Mapping[str, Any]:
        """What of it has a state that checkpoints keep, by name."""
        return {}

    @property
    @abstractmethod
    def dataset_id(self) -> str:
        """The name of its content: a checkpoint belongs to one."""

    @abstractmethod
    def count(self, split: str) -> int:
        """Return the number of samples of a split."""

    @abstractmethod
    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Return the samples at these positions (0 … count - 1) as one batch on the device."""

    def read_each(self, split: str, parts: Sequence[NDArray[np.int64]], device: torch.device) -> Iterator[Any]:
        """Yield what `read` returns for each of these positions, in order, read ahead where that is worth it."""
        return (self.read(split, positions, device) for positions in parts)

    def name_split(self, split: str) -> str:
        """Return a name that tells the content of a split from another's; "" where there is none."""
        return ""

    @abstractmethod
    def make_reader(self, device: torch.device, prefetch_batches: int | None) -> Reader:
        """Return what reads the training samples of this rank."""

    def close(self) -> None:
        """End what reads ahead for good."""
        return


class ArrayData(TrainingData):
    """Data in arrays of this node, whose batches are pairs (inputs, targets)."""

    device: torch.device
    """Where samples are gathered."""
    is_larger_than_memory: bool
    """Whether the arrays did not fit into what memory was free when they were opened."""

    @abstractmethod
    def samples(self, split: str, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the samples at these positions as one batch on `device`."""

    def samples_on_device(self, split: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `samples` at positions that are on `device` already, which nothing waits for."""
        return self.samples(split, positions.cpu().numpy())

    @abstractmethod
    def will_need(self, split: str, first: int, last: int) -> None:
        """Have the kernel read the samples at positions [first, last) into memory, without waiting for it."""

    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Return the samples at these positions as one batch on the device."""
        return tuple(part.to(device) for part in self.samples(split, positions))

    def make_reader(self, device: torch.device, prefetch_batches: int | None) -> Reader:
        """Return what reads the training samples of this rank, and ends its own thread."""
        return ArrayReader(self, device, prefetch_batches)


def batches_ahead(given: int | None, device: torch.device, resident: bool, larger_than_memory: bool) -> int:
    """Return how many batches a thread gathers ahead (``training.prefetch_batches``, if given). It is 0 if the device
    holds the data, and on a CPU, where it costs more than it saves, unless the data is larger than memory."""
    if resident:
        return 0
    if given is not None:
        return given
    return 1 if device.type != "cpu" or larger_than_memory else 0


def fits_on_device(data_bytes: int, free_bytes: int) -> bool:
    """Return whether features and targets fit into `RESIDENT_SHARE` of a device's free memory, in bytes."""
    return data_bytes <= RESIDENT_SHARE * free_bytes


def copies_to(device: torch.device) -> DeviceCopies | None:
    """Return what copies batches to a GPU while that computes; None for another device."""
    if device.type != "cuda":
        return None
    made: DeviceCopies = load(COPIES)(load(CUDA_COPIES)(device))
    return made


class BatchLoader:
    """The batches of one rank in one world."""

    def __init__(
        self, reader: Reader, sampler: Sampler, device: torch.device, faults: Faults, timer: StepTimer
    ) -> None:
        self.reader, self.sampler, self.device, self.faults, self.timer = reader, sampler, device, faults, timer

    def batches(self, epoch: int, offset: int, step: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from position ``offset`` of it on. ``step``: the optimizer steps that are done
        by then, over all epochs."""
        planned: deque[PlannedStep] = deque()
        coming = self.reader.read(self._plan(epoch, offset, step, planned))
        for number in range(self.sampler.steps_from(offset)):
            self.timer.mark("other")
            self.faults.reach("input", step + number)
            read = next(coming)  # which also plans the step, where it was not planned ahead
            wanted = planned.popleft()
            micro_batches = tuple(
                Samples(part.number, len(part.positions), move_to(data, self.device), part.place, part.positions)
                for part, data in zip(wanted.parts, read, strict=True)
            )
            yield Batch(wanted.samples, micro_batches, wanted.digest, self.sampler.kind)

    def close(self) -> None:
        """End what reads ahead."""
        self.reader.close()

    def _plan(self, epoch: int, offset: int, step: int, planned: deque[PlannedStep]) -> Iterator[PlannedStep]:
        """Yield the steps from a position of the epoch on, which are dealt some at once; each goes into ``planned``."""
        sampler = self.sampler
        if self.reader.order_device is not None and sampler.shuffle_block is None and sampler.drawing is None:
            yield from self._plan_on_device(self.reader.order_device, epoch, offset, step, planned)
            return
        for numbers in sampler.together(offset, PLANNED):
            dealt = sampler.steps(epoch, offset, numbers)
            if sampler.kind == DRAWS:  # one sample may be drawn twice, but each draw is made once
                cut = [each for cuts in sampler.cuts(offset, numbers) for each in cuts]
                counted = np.concatenate([np.arange(start, stop, dtype=np.int64) for *_, start, stop in cut])
            else:
                counted = np.concatenate([part.positions for _, parts in dealt for part in parts])
            lengths = [sum(len(part.positions) for part in parts) for _, parts in dealt]
            starts = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64)
            for number, (samples, parts), used in zip(numbers, dealt, digests(counted, starts), strict=True):
                ahead = sampler.ahead(epoch, offset, number, is_first=not number)
                planned.append(PlannedStep(step + number, sampler.seed, samples, parts, used, ahead))
                yield planned[-1]

    def _plan_on_device(
        self, device: torch.device, epoch: int, offset: int, step: int, planned: deque[PlannedStep]
    ) -> Iterator[PlannedStep]:
        """Do the same where the device holds the data, and its order too: samples stay places in it."""
        sampler = self.sampler
        order = load(DEVICE_ORDER).of_epoch(sampler.samples, sampler.seed, epoch, device)
        make_places = load(PLACES)
        for first in range(0, sampler.steps_from(offset), PLANNED_PLACES):
            numbers = range(first, min(first + PLANNED_PLACES, sampler.steps_from(offset)))
            dealt = sampler.cuts(offset, numbers)
            edges = np.array([cut[2:] for cuts in dealt for cut in cuts], dtype=np.int64)
            used = iter(order.digests(edges[:, 0], edges[:, 1]))
            for number, cuts in zip(numbers, dealt, strict=True):
                begin, end = sampler.batch_range(offset, number)
                parts = [
                    MicroBatch(part, make_places(start, stop, partial(sampler.order, epoch)), place)
                    for part, place, start, stop in cuts
                ]
                digest = reduce(add, (next(used) for _ in cuts))
                planned.append(PlannedStep(step + number, sampler.seed, end - begin, parts, digest, [], order))
                yield planned[-1]


class ArrayReader:
    """Gathers whole steps from arrays of this node, ahead in a thread where that is worth it."""

    def __init__(self, data: ArrayData, device: torch.device, prefetch_batches: int | None) -> None:
        self.data, self.device = data, device
        resident = data.device.type == device.type != "cpu"
        self.order_device = device if resident else None
        self.ahead = batches_ahead(prefetch_batches, device, resident, data.is_larger_than_memory)
        self._pool = (
            ThreadPoolExecutor(1, thread_name_prefix="gather", initializer=self._settle_thread) if self.ahead else None
        )
        self.copies = None if resident else copies_to(device)

    def read(self, steps: Iterator[PlannedStep]) -> Iterator[Sequence[Any]]:
        """Yield the pairs (inputs, targets) of the micro-batches of each step."""
        if self._pool is None:
            for step in steps:
                yield self._take(self._gather(step))
            return
        coming: deque[Future[Any]] = deque()
        for step in steps:
            coming.append(self._pool.submit(self._gather, step))
            if len(coming) > self.ahead:
                yield self._take(coming.popleft().result())
        while coming:
            yield self._take(coming.popleft().result())

    def close(self) -> None:
        """End the gathering thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # what is being gathered right now ends first

    def _settle_thread(self) -> None:
        """The current GPU is each thread's own: without this, pinning would open a context on the first one."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _gather(self, step: PlannedStep) -> tuple[Any, list[int]]:
        """Return the data of a step, or their copy under way, and the samples of each micro-batch."""
        if self.data.device.type == "cpu":
            for first, last in step.ahead:
                self.data.will_need("train", first, last)
        parts = [part.positions for part in step.parts]
        if step.order is not None:
            mine = [step.order.samples[each.first : each.last] for each in parts]
            inputs, target = self.data.samples_on_device("train", mine[0] if len(mine) == 1 else torch.cat(mine))
        else:
            inputs, target = self.data.samples("train", parts[0] if len(parts) == 1 else np.concatenate(parts))
        data = inputs, target
        return (data if self.copies is None else self.copies.start(data)), [len(positions) for positions in parts]

    def _take(self, found: tuple[Any, list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Return a gathered step, on whose copy the computing stream waits from now on."""
        data, sizes = found
        inputs, target = data if self.copies is None else self.copies.take(data)
        if len(sizes) == 1:
            return [(inputs, target)]
        return list(zip(inputs.split(sizes), target.split(sizes), strict=True))

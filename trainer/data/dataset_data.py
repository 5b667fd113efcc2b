"""A user's own map-style datasets as the data of a training: read by position, in the order that the sampler deals.

torch's `DataLoader` reads them, with its worker processes and its collate function; which samples make a micro-batch
is the sampler's decision. So every sample is used once per epoch, whatever nodes come and go. What a user's own loader
asks for is read in `trainer.data.user_loaders`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from trainer.comm.world import World
from trainer.data.batches import Batch, Samples, move_to
from trainer.data.coverage import digests
from trainer.data.loader_workers import end_workers, worker_start
from trainer.data.sampler import Sampler, micro_batch_seed
from trainer.errors import ConfigError
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

PLANNED = 1 << 13
"""Samples of this rank that are dealt together, about."""
_PROBED = 4
"""Samples whose content goes into a dataset's name."""
_WORTH_WORKERS = 4
"""The fewest batches of an evaluation for which workers are started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """How samples are read, in the terms of `torch.utils.data.DataLoader`."""

    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0.0
    multiprocessing_context: Any = None


@dataclass(frozen=True, slots=True)
class _Order:
    """One micro-batch to be read: the seed of its random state, and its positions (n,)."""

    seed: int
    positions: NDArray[np.int64]


class _Read(Dataset[Any]):
    """Reads whole micro-batches of a dataset, in this process or in a worker. Random changes to samples are drawn from
    the micro-batch's own seed: they do not depend on which rank or worker reads it."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn or default_collate
        # Rows of tensors need no collate: picking them gives the same as stacking them one by one.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate_fn is None else None

    def __getitems__(self, orders: Sequence[_Order]) -> list[Any]:
        return [self[order] for order in orders]

    def __getitem__(self, order: _Order) -> Any:
        if self._tensors is not None:
            index = torch.from_numpy(order.positions)
            return tuple(tensor[index] for tensor in self._tensors)
        _seed_all(order.seed)
        positions = order.positions.tolist()
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(positions) if callable(many) else [self.dataset[position] for position in positions]
        return self.collate_fn(samples)


def _seed_all(seed: int) -> None:
    """Seed the random states that transformations of samples draw from, in this process."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Leave the random states of this process as they were when the block ends."""
    state = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])


class _Queue:
    """The micro-batches that torch's loader is to read next, one per item."""

    def __init__(self) -> None:
        self.orders: Iterator[_Order] = iter(())

    def __iter__(self) -> Iterator[list[_Order]]:
        for order in self.orders:
            yield [order]


def _only(parts: list[Any]) -> Any:
    """Return the one micro-batch of an item, which is collated already."""
    return parts[0]


@dataclass(slots=True)
class DatasetData:
    """The datasets of a training, by split. Their lengths are those at the beginning."""

    train: Dataset[Any]
    valid: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    options: ReadOptions = field(default_factory=ReadOptions)
    name: str | None = None
    """The name of the content; None: from its type, its length and a few of its samples."""
    _loader: DataLoader[Any] | None = None
    _queue: _Queue = field(default_factory=_Queue)
    _readers: dict[str, _Read] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split, dataset in (("train", self.train), ("valid", self.valid), ("test", self.test)):
            if dataset is not None:
                _check(dataset, split)
                self._readers[split] = _Read(dataset, self.options.collate_fn)
                self._counts[split] = len(cast(Sized, dataset))
        if not self.count("train"):
            raise ConfigError("the training dataset has no samples")
        self.name = self.name or _name_of(self.train)

    @property
    def dataset_id(self) -> str:
        """The name of the training samples."""
        assert self.name is not None
        return self.name

    def name_split(self, split: str) -> str:
        """Return a name that tells the content of a split from another's, as far as a few samples tell it; of tensors
        all. "" where there is none."""
        dataset = self._readers[split].dataset if split in self._readers else None
        if type(dataset) is TensorDataset:
            return "-".join(digest_array(tensor) for tensor in dataset.tensors)
        return "" if dataset is None else _name_of(dataset)

    def count(self, split: str) -> int:
        """Return the number of samples of a split, 0 where there is none."""
        return self._counts.get(split, 0)

    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Return the samples at these positions as one batch on the device, read in this process."""
        with _own_random_state():
            return move_to(self._readers[split][_Order(int(positions[0]), positions)], device)

    def read_each(self, split: str, parts: Sequence[NDArray[np.int64]], device: torch.device) -> Iterator[Any]:
        """Yield what `read` returns for each of these positions, read by workers where the caller's loader has some."""
        if not self.options.num_workers or len(parts) < _WORTH_WORKERS:
            for positions in parts:
                yield self.read(split, positions, device)
            return
        orders = [[_Order(int(positions[0]), positions)] for positions in parts]
        loader = DataLoader(
            self._readers[split], batch_sampler=cast(Any, orders), collate_fn=_only, **self._with_workers(None)
        )
        try:
            for data in loader:
                yield move_to(data, device)
        finally:
            end_workers(loader)

    def make_loader(
        self, sampler: Sampler, world: World, faults: Faults, timer: StepTimer, prefetch_batches: int | None
    ) -> DatasetLoader:
        """Return the loader of this rank's samples. Its worker processes are those of the loader before it."""
        if self._loader is None:
            options = self.options
            self._loader = DataLoader(
                self._readers["train"], batch_sampler=cast(Any, self._queue), collate_fn=_only,
                pin_memory=options.pin_memory and world.device.type == "cuda",
                **(self._with_workers(prefetch_batches) if options.num_workers else {}),
            )  # fmt: skip
        check = self.refuse_other_length
        return DatasetLoader(self._loader, self._queue, sampler, world.device, faults, timer, check)

    def refuse_other_length(self) -> None:
        """Raise `ConfigError` if the training dataset has another length than at the beginning."""
        found, known = len(cast(Sized, self.train)), self.count("train")
        if found != known:
            raise ConfigError(
                f"the training dataset had {known} samples when training began and has {found} now: its length must "
                "stay, since the steps and the samples of each are known from it; start anew with the other length"
            )

    def close(self) -> None:
        """End the worker processes."""
        if self._loader is not None:
            end_workers(self._loader)
            self._loader = None

    def _with_workers(self, prefetch_batches: int | None) -> dict[str, Any]:
        options = self.options
        return {
            "num_workers": options.num_workers, "persistent_workers": True,
            "prefetch_factor": prefetch_batches or options.prefetch_factor,
            "worker_init_fn": worker_start(options.multiprocessing_context, options.worker_init_fn),
            "timeout": options.timeout, "multiprocessing_context": options.multiprocessing_context,
        }  # fmt: skip


class DatasetLoader:
    """The batches of one rank in one world."""

    def __init__(
        self, loader: DataLoader[Any], queue: _Queue, sampler: Sampler, device: torch.device, faults: Faults,
        timer: StepTimer, before_epoch: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """``before_epoch`` is called before the first batch of (the rest of) an epoch; it may raise."""
        self.loader, self.queue, self.sampler, self.device = loader, queue, sampler, device
        self.faults, self.timer, self.before_epoch = faults, timer, before_epoch

    def batches(self, epoch: int, offset: int, step: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from position ``offset`` of it on. ``step``: the steps done by then."""
        self.before_epoch()
        planned: list[tuple[int, list[tuple[int, int]], int]] = []
        self.queue.orders = self._orders(epoch, offset, step, planned)
        coming = iter(self.loader)
        for number in range(self.sampler.steps_from(offset)):
            self.timer.mark("other")
            self.faults.reach("input", step + number)
            first = next(coming)  # which also deals the step, where it was not dealt ahead
            samples, parts, digest = planned.pop(0)
            data = [first, *(next(coming) for _ in parts[1:])]
            micro_batches = tuple(
                Samples(place, count, move_to(part, self.device))
                for (place, count), part in zip(parts, data, strict=True)
            )
            yield Batch(samples, micro_batches, digest)

    def close(self) -> None:
        """Deal no more; the workers stay for the next loader."""
        self.queue.orders = iter(())

    def _orders(self, epoch: int, offset: int, step: int, planned: list[Any]) -> Iterator[_Order]:
        """Deal the steps, some at once, and yield their micro-batches; what each step holds goes into ``planned``."""
        sampler = self.sampler
        for numbers in sampler.together(offset, PLANNED):
            for number, (samples, parts) in zip(numbers, sampler.steps(epoch, offset, numbers), strict=True):
                [digest] = digests(np.concatenate([part.positions for part in parts]), np.zeros(1, dtype=np.int64))
                planned.append((samples, [(part.number, len(part.positions)) for part in parts], digest))
                for part in parts:
                    seed = micro_batch_seed(sampler.seed, step + number, part.number)
                    yield _Order(seed, part.positions)


def _check(dataset: Dataset[Any], split: str) -> None:
    """Raise `ConfigError` for a dataset that cannot be read by position."""
    name = type(dataset).__name__
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"the {split} dataset {name} is iterable: its samples have no positions, so they cannot be dealt to nodes "
            "that come and go, nor be used exactly once. Give a map-style dataset (__getitem__ and __len__)"
        )
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise ConfigError(f"the {split} dataset {name} needs __getitem__ and __len__")


def digest_array(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Return sixteen hex digits over the type, shape and content of a tensor or an array."""
    content = f"{value.dtype}{tuple(value.shape)}".encode()
    if isinstance(value, np.ndarray):
        content += b"" if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    elif value.layout is torch.strided and not value.is_quantized and value.device.type != "meta":
        content += value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _name_of(dataset: Any) -> str:
    """Return a name that tells this content from another's: its type, length and a few samples, where they have bytes.
    Random changes to samples are drawn with one seed."""
    count = len(dataset)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    digest = hashlib.sha256(f"{kind}/{count}".encode())
    with _own_random_state():
        for position in np.unique(np.linspace(0, count - 1, min(count, _PROBED)).astype(np.int64)).tolist():
            _seed_all(position)
            for part in torch.utils._pytree.tree_leaves(dataset[position]):
                if isinstance(part, Tensor) and part.layout is torch.strided:
                    part = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                if isinstance(part, np.ndarray | np.generic) and not part.dtype.hasobject:
                    digest.update(np.ascontiguousarray(part).tobytes())
                elif isinstance(part, str | int | float | bool):
                    digest.update(repr(part).encode())
    return f"{type(dataset).__qualname__.lower().strip('<>')}-{digest.hexdigest()[:16]}"

"""A user's own map-style datasets as the data of a training: read by position, in the order that the sampler deals.

torch's `DataLoader` reads them, with its worker processes and its collate function; which samples make a micro-batch
is the sampler's decision. So every sample is used once per epoch, whatever nodes come and go.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from trainer.comm.launcher_env import RankFacts
from trainer.config import DistributedTrainingConfig
from trainer.data.batches import digest_array, move_to, update_digest
from trainer.data.drawing import choose_drawing
from trainer.data.loader import PlannedStep, TrainingData, copies_to
from trainer.data.random_state import own_random_state, seed_all
from trainer.data.sampler import micro_batch_seed
from trainer.data.torch_loader import ReadOptions, WorkerPool, explain_iterable
from trainer.errors import ConfigError
from trainer.runtime.launch import Launch

if TYPE_CHECKING:
    from trainer.data.on_device import DeviceCopies

_PROBED, _PROBED_WELL = 4, 32
"""Samples whose content goes into a dataset's name, and into that of a split that scores are compared on."""
_WORTH_WORKERS = 4
"""The fewest batches of an evaluation for which workers are started."""


@dataclass(frozen=True, slots=True)
class _Order:
    """One micro-batch to be read: its split, the seed of its random state, and its positions (n,)."""

    split: str
    seed: int
    positions: NDArray[np.int64]


_OWN = ("datasets", "_collate", "_tensors")
"""The attributes of `_Read`; all others are of the caller's dataset."""


class _Read(Dataset[Any]):
    """Reads whole micro-batches of datasets, in this process or in a worker. Random changes to samples are drawn from
    the micro-batch's own seed: they do not depend on which rank or worker reads it."""

    def __init__(self, datasets: Mapping[str, Dataset[Any]], options: Mapping[str, ReadOptions]) -> None:
        self.datasets = dict(datasets)
        self._collate = {split: options[split].collate_fn or default_collate for split in datasets}
        # Rows of tensors need no collate: picking them gives the same as stacking them one by one.
        self._tensors = {
            split: dataset.tensors
            for split, dataset in datasets.items()
            if type(dataset) is TensorDataset and options[split].collate_fn is None
        }

    def __getitems__(self, orders: Sequence[_Order]) -> list[Any]:
        return [self[order] for order in orders]

    def __getitem__(self, order: _Order) -> Any:
        if order.split in self._tensors:
            index = torch.from_numpy(order.positions)
            return tuple(tensor[index] for tensor in self._tensors[order.split])
        seed_all(order.seed)
        dataset, positions = self.datasets[order.split], order.positions.tolist()
        many = getattr(dataset, "__getitems__", None)
        samples = many(positions) if callable(many) else [dataset[position] for position in positions]
        return self._collate[order.split](samples)

    def __len__(self) -> int:
        return len(cast(Sized, next(iter(self.datasets.values()))))

    def __getattr__(self, name: str) -> Any:
        """Return what a caller's ``worker_init_fn`` looks for in its dataset."""
        if name.startswith("__") or "datasets" not in vars(self):
            raise AttributeError(name)
        return getattr(next(iter(self.datasets.values())), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what a caller's ``worker_init_fn`` sets in its dataset."""
        first = None if name in _OWN else next(iter(self.datasets.values()))
        object.__setattr__(self if first is None else first, name, value)


@dataclass(slots=True)
class DatasetData(TrainingData):
    """The datasets of a training, by split. Their lengths are those at the beginning."""

    train: Dataset[Any]
    valid: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    options: Mapping[str, ReadOptions] = field(default_factory=dict)
    """How each split is read; the usual way where it is not said."""
    name: str | None = None
    """The name of the content; None: from its type, its length and a few of its samples."""
    _reader: _Read = field(init=False)
    _pools: dict[str, WorkerPool] = field(default_factory=dict)
    """The workers of each split that has some. Those of the others are read in this process."""
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        datasets: dict[str, Dataset[Any]] = {}
        for split, dataset in (("train", self.train), ("valid", self.valid), ("test", self.test)):
            if dataset is not None:
                _check(dataset, split)
                datasets[split] = dataset
                self._counts[split] = len(cast(Sized, dataset))
        if not self.count("train"):
            raise ConfigError("the training dataset has no samples")
        self.options = {split: self.options.get(split, ReadOptions()) for split in datasets}
        self._reader = _Read(datasets, self.options)
        self.name = self.name or _name_of(self.train)

    def draw_by(self, sample_weights: Any, lengths: Any) -> None:
        """Draw training samples by these weights, or with those of like length together; None: as usual. Raise
        `ConfigError` for what cannot be used. Its name tells this order from others."""
        self.drawing = choose_drawing(self.count("train"), sample_weights, lengths)
        if self.drawing is not None:
            self.name = f"{self.name}-{self.drawing.name}"

    @property
    def dataset_id(self) -> str:
        """The name of the training samples."""
        assert self.name is not None
        return self.name

    def name_split(self, split: str) -> str:
        """Return a name that tells the content of a split from another's, as far as a few samples tell it; of tensors
        all. "" where there is none."""
        dataset = self._reader.datasets.get(split)
        rows: Any = slice(None)
        if type(dataset) is Subset:
            dataset, rows = dataset.dataset, list(dataset.indices)  # type: ignore[attr-defined]
        if type(dataset) is TensorDataset:
            return "-".join(digest_array(tensor[rows]) for tensor in dataset.tensors)
        dataset = self._reader.datasets.get(split)
        return "" if dataset is None else _name_of(dataset, probed=_PROBED_WELL)

    def collate_of(self, split: str) -> Callable[[list[Any]], Any] | None:
        """Return what makes batches of a split; None for the usual way."""
        return self.options[split].collate_fn if split in self.options else None

    def count(self, split: str) -> int:
        """Return the number of samples of a split, 0 where there is none."""
        return self._counts.get(split, 0)

    def start_workers(self, config: DistributedTrainingConfig, facts: RankFacts) -> None:
        """Start the worker processes that the loaders ask for, which stay until `close`: those of the training split,
        and those of the other two, together where they are to be alike. To be called before other threads start
        (`trainer.data.torch_loader`)."""
        # The others wait that long for this rank.
        has_peers = facts.world_size > 1 or Launch.read(os.environ).is_elastic
        patience = 0.9 * config.collective_timeout_seconds if has_peers else 0.0
        judged = [[split] for split in ("valid", "test") if self._is_worth_workers(split, config)]
        ways = [replace(self.options[split], collate_fn=None, pin_memory=False) for [split] in judged]
        if len(judged) == 2 and ways[0] == ways[1] and ways[0].worker_init_fn is None:
            judged = [["valid", "test"]]
        # In this order: the workers of the training split may come with a thread that pins memory.
        for splits in (*judged, ["train"]):
            options = self.options[splits[0]]
            if not options.num_workers:
                continue
            if splits == ["train"]:
                pins = options.pin_memory and config.backend != "gloo" and torch.cuda.is_available()
                prefetch = config.prefetch_batches or options.prefetch_factor
                options = replace(options, pin_memory=pins, prefetch_factor=prefetch)
            else:
                options = replace(options, pin_memory=False)
            pool = self.pool_of(splits, options, facts.rank, patience)
            self._pools |= dict.fromkeys(splits, pool)
            pool.start()

    def pool_of(self, splits: list[str], options: ReadOptions, rank: int, patience: float) -> WorkerPool:
        """Return the workers of some splits, or what reads them in this process; see `WorkerPool`."""
        reader = _Read({split: self._reader.datasets[split] for split in splits}, self.options)
        return WorkerPool(reader, options, rank, patience)

    def training_pool(self, device: torch.device) -> WorkerPool:
        """Return the workers of the training samples. They are those of the reader before."""
        if "train" not in self._pools:
            options = replace(self.options["train"], num_workers=0, prefetch_factor=None)
            pins = options.pin_memory and device.type == "cuda"
            self._pools["train"] = self.pool_of(["train"], replace(options, pin_memory=pins), rank=0, patience=0.0)
        return self._pools["train"]

    def _is_worth_workers(self, split: str, config: DistributedTrainingConfig) -> bool:
        batches = self.count(split) // (config.batch_size_per_gpu * config.world_size)
        return split in self.options and self.options[split].num_workers > 0 and batches >= _WORTH_WORKERS

    def read(self, split: str, positions: NDArray[np.int64], device: torch.device) -> Any:
        """Return the samples at these positions as one batch on the device, read in this process."""
        return move_to(self._read_here(_Order(split, int(positions[0]), positions)), device)

    def read_each(self, split: str, parts: Sequence[NDArray[np.int64]], device: torch.device) -> Iterator[Any]:
        """Yield what `read` returns for each of these positions, read by workers where the caller's loader has some."""
        pool, copies = self._pools.get(split), copies_to(device)
        orders = (_Order(split, int(positions[0]), positions) for positions in parts)
        by_workers = pool if len(parts) >= _WORTH_WORKERS else None
        read = map(self._read_here, orders) if by_workers is None else by_workers.read(orders)
        for data in read if copies is None else copies.ahead(read):
            yield move_to(data, device)

    def _read_here(self, order: _Order) -> Any:
        with own_random_state():
            return self._reader[order]

    def make_reader(self, device: torch.device, prefetch_batches: int | None) -> DatasetReader:
        """Return the reader of training samples. Its worker processes are those of the reader before it."""
        return DatasetReader(self.training_pool(device), self.refuse_other_length, copies_to(device))

    def refuse_other_length(self) -> None:
        """Raise `ConfigError` if the training dataset has another length than at the beginning."""
        found, known = len(cast(Sized, self.train)), self.count("train")
        if found != known:
            raise ConfigError(
                f"the training dataset had {known} samples when training began and has {found} now: its length must "
                "not change, since it determines the samples of each step; start a new training with the new length"
            )

    def close(self) -> None:
        """End the worker processes."""
        for pool in dict.fromkeys(self._pools.values()):
            pool.close()
        self._pools.clear()


@dataclass(frozen=True, slots=True)
class DatasetReader:
    """Reads micro-batches by the workers of a pool."""

    pool: WorkerPool
    before_epoch: Callable[[], object]
    """Called before the first batch of (the rest of) an epoch; it may raise."""
    copies: DeviceCopies | None = None
    """What copies them to the device while that computes; None: the step copies them itself."""

    @property
    def order_device(self) -> None:
        """None: it wants positions."""

    def read(self, steps: Iterator[PlannedStep]) -> Iterator[Sequence[Any]]:
        """Yield the micro-batches of each step, as the collate function makes them. With copies to a device, the
        next step is read before a step is yielded."""
        self.before_epoch()
        counts: deque[int] = deque()

        def orders() -> Iterator[_Order]:
            for step in steps:
                counts.append(len(step.parts))
                for part in step.parts:
                    seed = micro_batch_seed(step.seed, step.step, part.number, part.place)
                    yield _Order("train", seed, part.positions)

        coming = self.pool.read(orders())
        read = ([first, *islice(coming, counts.popleft() - 1)] for first in coming)
        yield from read if self.copies is None else self.copies.ahead(read)

    def close(self) -> None:
        """The workers stay for the next reader."""


def _check(dataset: Dataset[Any], split: str) -> None:
    """Raise `ConfigError` for a dataset that cannot be read by position."""
    name = type(dataset).__name__
    is_iterable = isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")
    if is_iterable or isinstance(dataset, IterableDataset):
        raise ConfigError(explain_iterable(f"the {split} dataset {name} is iterable", split))
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise ConfigError(f"the {split} dataset {name} needs __getitem__ and __len__")


def _name_of(dataset: Any, probed: int = _PROBED) -> str:
    """Return a name that tells this content from another's: its type, length and a few samples, where they have bytes.
    Random changes to samples are drawn with one seed."""
    count = len(dataset)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    digest = hashlib.sha256(f"{kind}/{count}".encode())
    with own_random_state():
        for position in np.unique(np.linspace(0, count - 1, min(count, probed)).astype(np.int64)).tolist():
            seed_all(position)
            update_digest(digest, dataset[position])
    return f"{type(dataset).__qualname__.lower().strip('<>')}-{digest.hexdigest()[:16]}"

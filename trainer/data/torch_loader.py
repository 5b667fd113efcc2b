"""torch's loader: what that of a caller asks for, and ours of whole micro-batches with the worker processes for it.

A caller's samples are dealt by our sampler: what is taken over of its loader, what cannot be honoured and is refused by
name, and what runs with a guarantee fewer, which is told, is decided here (`read_request`).

Workers are forked while this process has no threads of the trainer yet, and stay until it ends: a process that is
forked beside threads inherits the locks that they hold at that moment, and may wait for one of them for ever. What they
read, and in which order, is `trainer.data.dataset_data`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from trainer.data.stream import Stream
from trainer.errors import ConfigError, WorkerHungError
from trainer.runtime.parent_death import die_with

_UNDERSTOOD = (RandomSampler, SequentialSampler, DistributedSampler)
_STACK = signal.SIGUSR2
"""The signal on which a worker writes where it stands to the log of its node."""
INLINE_BYTES = 256 << 10
"""Bytes up to which a worker sends a tensor itself. torch sends the descriptor of shared memory, which takes the two
processes a new connection, about 0.5 ms; as much as to copy 500 KiB."""


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

    @property
    def forks(self) -> bool:
        """Whether workers are forked from this process, and inherit all that it has."""
        context: Any = self.multiprocessing_context or multiprocessing
        if isinstance(context, str):
            return context == "fork"
        return bool(context.get_start_method() == "fork")


@dataclass(frozen=True, slots=True)
class LoaderRequest:
    """What a caller gave for one split."""

    dataset: Dataset[Any]
    batch_size: int | None
    """None where a dataset was given."""
    options: ReadOptions
    notes: tuple[str, ...]
    """What is different from the caller's loader, as sentences."""


def read_request(given: Dataset[Any] | DataLoader[Any], split: str) -> LoaderRequest:
    """Return what a dataset or a loader asks for. Raise `ConfigError`, which names the part and the remedy, for what
    cannot be honoured."""
    if not isinstance(given, DataLoader):
        return LoaderRequest(given, None, ReadOptions(), ())
    what = f"the {split} loader"
    is_stream = split == "train" and isinstance(given.dataset, Stream)
    if isinstance(given.dataset, IterableDataset) and not is_stream:
        raise ConfigError(explain_iterable(f"{what} reads {type(given.dataset).__name__}, an iterable dataset", split))
    if given.batch_size is None or type(given.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"{what} has a batch_sampler of its own ({type(given.batch_sampler).__name__}): the trainer decides "
            "which samples form a batch, the same ones at any number of nodes. Give batch_size instead"
        )
    sampler = given.sampler
    if type(sampler) not in _UNDERSTOOD and not is_stream:
        raise ConfigError(
            f"{what} has the sampler {type(sampler).__name__}: the trainer decides the order of samples, and uses "
            "each once per epoch. Leave the sampler out; fit(…, sample_weights=…) draws by weights, fit(…, lengths=…) "
            "puts samples of like length together"
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        raise ConfigError(
            f"{what} draws {sampler.num_samples} samples with replacement or in part, and the trainer uses each sample "
            "once per epoch: leave replacement and num_samples out; fit(…, sample_weights=…) draws with replacement"
        )
    notes = list[str]()
    if is_stream and given.num_workers > 1:
        notes.append(
            f"the training loader has {given.num_workers} workers; a stream is read by one on each rank, since a "
            "sub-stream is read in order"
        )
    if split == "train":
        if isinstance(sampler, SequentialSampler):
            notes.append("the training loader does not shuffle; the trainer does, by training.seed and epoch")
        if given.drop_last:
            notes.append("the training loader drops the last samples; the trainer uses each sample once per epoch")
    options = ReadOptions(
        collate_fn=None if given.collate_fn is default_collate else given.collate_fn,
        num_workers=given.num_workers,
        prefetch_factor=given.prefetch_factor if given.num_workers else None,
        pin_memory=given.pin_memory,
        worker_init_fn=given.worker_init_fn,
        timeout=given.timeout,
        multiprocessing_context=given.multiprocessing_context,
    )
    return LoaderRequest(given.dataset, given.batch_size, options, tuple(notes))


def explain_iterable(what: str, split: str) -> str:
    """Return why an iterable dataset is no dataset of a split, and the remedy. ``what``: which it is."""
    if split == "train":
        return (
            f"{what}: its samples have no positions, so they cannot be dealt to nodes that come and go, nor be used "
            "exactly once. Give trainer.Stream(make_substream, count=…), where make_substream(number, count) returns "
            "the iterable of a part, or a map-style dataset (__getitem__ and __len__)"
        )
    return (
        f"{what}: what is judged on needs positions, since ranks share it. Read it into a list, as in "
        f"{split}=list(dataset), or give another map-style dataset (__getitem__ and __len__)"
    )


def _begin_worker(parent: int | None, own: Callable[[int], None] | None, worker: int) -> None:
    """Prepare this process, which is the worker of this number. ``parent``: the rank's process, None where another one
    starts the workers; ``own``: the caller's ``worker_init_fn``.

    A worker that is forked inherits its rank's connections, so it must not outlive the rank: peers would wait for
    connections that nobody closes. Signals to a whole node or terminal are the rank's to act on; the rank ends its
    workers.
    """
    if parent is not None:
        die_with(parent)
    ForkingPickler.register(Tensor, _reduce)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(_STACK, file=sys.stderr, all_threads=False)
    if own is not None:
        own(worker)


def _reduce(tensor: Tensor) -> Any:
    """Return how a worker sends a tensor: a small one by its values, another as torch does."""
    tensor = tensor.resolve_conj().resolve_neg()  # of which torch would send what they are views of
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    if is_plain and tensor.nbytes <= INLINE_BYTES and tensor.is_contiguous():
        with contextlib.suppress(TypeError):  # numpy has no bfloat16
            return _tensor_of, (tensor.numpy(),)
    return reduce_tensor(tensor)


def _tensor_of(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values)


class WorkerPool:
    """A loader whose items are read by worker processes, if the options ask for any, else by this process."""

    def __init__(self, dataset: Dataset[Any], options: ReadOptions, rank: int, patience: float) -> None:
        """``dataset`` reads one micro-batch for each order that it is given. ``patience``: the seconds to wait for the
        next item (0: no limit), where the options do not say."""
        self.dataset, self.options, self.rank = dataset, options, rank
        self.patience = options.timeout or patience
        self._orders: Iterable[Any] = ()
        self._loader = self._make_loader()

    def start(self) -> None:
        """Start the workers. To be called before this process has other threads."""
        if self.options.num_workers:
            iter(self._loader)

    def read(self, orders: Iterable[Any]) -> Iterator[Any]:
        """Yield what the dataset gives for each order. Raise `WorkerHungError` where it takes longer than the
        patience."""
        if not self.options.num_workers and not self.options.pin_memory:  # torch's loader would only be in between
            yield from map(self.dataset.__getitem__, orders)
            return
        self._orders = orders
        try:
            yield from self._loader
        except Exception as error:
            if not str(error).startswith("DataLoader timed out"):
                _end_workers(self._loader)
                raise
            raise WorkerHungError(
                f"rank {self.rank}: {self._end_hung()} did not answer for {self.patience:g} s while they read samples; "
                "their stacks are in the log of the node. If reading takes that long, give the loader a longer "
                "timeout, and raise training.collective_timeout_seconds, which is how long the other ranks wait. If "
                "one waits for a lock that another thread of the script held when it was forked, start that thread "
                "later, or give the loader multiprocessing_context='forkserver'"
            ) from error

    def close(self) -> None:
        """End the workers: in order, and those that hang in a caller's code by force."""
        self._orders = ()
        _end_workers(self._loader)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield one order per item: torch's loader asks this for its batches."""
        for order in self._orders:
            yield [order]

    def _make_loader(self) -> DataLoader[Any]:
        options = self.options
        settings: dict[str, Any] = {"generator": torch.Generator()}  # not this process's own random state
        if options.num_workers:
            parent = os.getpid() if options.forks else None
            settings |= {
                "num_workers": options.num_workers,
                "persistent_workers": True,
                "prefetch_factor": options.prefetch_factor,
                "worker_init_fn": partial(_begin_worker, parent, options.worker_init_fn),
                "timeout": self.patience,
                "multiprocessing_context": options.multiprocessing_context,
            }
        return DataLoader(
            self.dataset, batch_sampler=cast(Any, self), collate_fn=_only, pin_memory=options.pin_memory, **settings
        )

    def _end_hung(self) -> str:
        """Let workers write where they stand, end them, and return them in words."""
        workers = _workers_of(self._loader)
        for worker in workers:
            if worker.is_alive():
                os.kill(worker.pid, _STACK)
                time.sleep(0.1)  # for what it writes, before another one does
        _end_workers(self._loader)
        return f"the worker processes {', '.join(str(worker.pid) for worker in workers)} of its loader"


def _only(parts: list[Any]) -> Any:
    """Return the one micro-batch of an item, which is collated already."""
    return parts[0]


def _workers_of(loader: DataLoader[Any]) -> list[Any]:
    return list(getattr(getattr(loader, "_iterator", None), "_workers", ()))


def _end_workers(loader: DataLoader[Any]) -> None:
    iterator, workers = getattr(loader, "_iterator", None), _workers_of(loader)
    if iterator is not None and workers:
        with contextlib.suppress(Exception):  # whatever one of them has left behind
            iterator._shutdown_workers()
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()
    loader._iterator = None

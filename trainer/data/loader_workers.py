"""torch's loader of whole micro-batches, with the worker processes that a caller's loader asks for.

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
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.errors import WorkerHungError
from trainer.runtime.parent_death import die_with

_STACK = signal.SIGUSR2
"""The signal on which a worker writes where it stands to the log of its node."""


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


def _begin_worker(parent: int | None, own: Callable[[int], None] | None, worker: int) -> None:
    """Prepare this process, which is the worker of this number. ``parent``: the rank's process, None where another one
    starts the workers; ``own``: the caller's ``worker_init_fn``.

    A worker that is forked inherits its rank's connections, so it must not outlive the rank: peers would wait for
    connections that nobody closes. Signals to a whole node or terminal are the rank's to act on; the rank ends its
    workers.
    """
    if parent is not None:
        die_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(_STACK, file=sys.stderr, all_threads=False)
    if own is not None:
        own(worker)


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

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
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkContext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainer.errors import WorkerHungError
from trainer.runtime.parent_death import die_with

ATTEMPTS = 7
"""How often a worker is started; each time it has twice as long."""
START_SECONDS = 2.0
"""How long a worker may take at first to start and to read one sample, at least; else four times as long as its rank
takes to read one."""
CALM_SECONDS = 0.01
"""The pause before each start, so that threads which wait for the interpreter go first: they may hold locks."""
_PID = struct.Struct("i")
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


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Begins a worker.

    One that is forked inherits its rank's connections, so it must not outlive the rank: peers would wait for
    connections that nobody closes. Signals to a whole node or terminal are the rank's to act on; the rank ends its
    workers.
    """

    parent: int | None
    """The rank's process; None where another process starts the workers, which then inherit nothing of the rank."""
    own: Callable[[int], None] | None
    """The caller's ``worker_init_fn``."""
    answers: int
    """The descriptor to which its process id is written once one sample was read; negative where it is not
    inherited."""

    def __call__(self, worker: int) -> None:
        """Prepare this process, which is the worker of this number."""
        if self.parent is not None:
            die_with(self.parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        faulthandler.register(_STACK, file=sys.stderr, all_threads=False)
        try:
            if self.own is not None:
                self.own(worker)
            info = get_worker_info()
            if self.answers >= 0 and info is not None:
                cast(Any, info.dataset).try_one()
        finally:
            if self.answers >= 0:
                os.write(self.answers, _PID.pack(os.getpid()))


class WorkerPool:
    """A loader whose items are read by worker processes, if the options ask for any, else by this process."""

    def __init__(self, dataset: Dataset[Any], options: ReadOptions, rank: int, patience: float) -> None:
        """``dataset`` reads one micro-batch for each order that it is given, and has ``try_one``, which reads one
        sample. ``patience``: the seconds to wait for the next item (0: no limit), where the options do not say."""
        self.dataset, self.options, self.rank = dataset, options, rank
        self.patience = options.timeout or patience
        self._orders: Iterable[Any] = ()
        has_answers = options.num_workers > 0 and options.forks  # a worker of another start inherits no pipe
        self._answers, self._answer = os.pipe() if has_answers else (-1, -1)
        self._starting: list[_Worker] = []
        self._seconds = START_SECONDS
        self._failure: RuntimeError | None = None
        self._loader = self._make_loader()

    def start(self) -> None:
        """Start the workers, and wait until each has read a sample; one that does not come that far is started again.
        To be called before this process has other threads. Raise `WorkerHungError` where that does not help, and
        RuntimeError for a worker that ends."""
        if self.options.num_workers:
            began = time.monotonic()
            cast(Any, self.dataset).try_one()
            self._seconds = max(START_SECONDS, 4 * (time.monotonic() - began))
            iter(self._loader)
            if self._failure is not None:
                _end_workers(self._loader)
                raise self._failure

    def take_up(self, worker: _Worker) -> None:
        """Count a worker as started; the last one waits until all have read a sample."""
        self._starting.append(worker)
        if len(self._starting) == self.options.num_workers:
            waiting, self._starting = self._starting, []
            try:
                self._wait_for_all(waiting)
            except RuntimeError as error:  # torch's loader is in the midst of being made
                self._failure = error
                for each in waiting:
                    each.kill()

    def _wait_for_all(self, waiting: list[_Worker]) -> None:
        seconds = self._seconds
        for attempt in range(ATTEMPTS):
            if attempt:
                seconds *= 2
                for each in waiting:
                    each.start_again()
            waiting = self._wait_for(waiting, seconds)
            if not waiting:
                return
        raise WorkerHungError(
            f"rank {self.rank}: a worker process of its loader did not read a sample within {seconds:g} s, though "
            f"it was started {ATTEMPTS} times. Its stack is in the log of the node: the worker probably waits for a "
            "lock that another thread of the script held when it was forked. Start that thread later, or give the "
            "loader multiprocessing_context='forkserver', or num_workers=0"
        )

    def _wait_for(self, workers: list[_Worker], seconds: float) -> list[_Worker]:
        """Return those of the workers that have not answered within this time. Raise RuntimeError for one that ends."""
        waiting, end = {worker.pid: worker for worker in workers}, time.monotonic() + seconds
        while waiting and (left := end - time.monotonic()) > 0:
            for worker in waiting.values():
                worker.join(0)
            ended = [worker for worker in waiting.values() if not worker.is_alive()]
            if select.select([self._answers], [], [], 0 if ended else min(left, 0.1))[0]:
                for (pid,) in _PID.iter_unpack(os.read(self._answers, 64 * _PID.size)):
                    waiting.pop(pid, None)
            elif ended:
                raise RuntimeError(
                    f"rank {self.rank}: worker process {ended[0].pid} of its loader ended with exit code "
                    f"{ended[0].exitcode} before it had read a sample (negative: by that signal); its output is in "
                    "the log of the node"
                )
        return list(waiting.values())

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
                "timeout, and raise training.collective_timeout_seconds, which is how long the other ranks wait"
            ) from error

    def close(self) -> None:
        """End the workers: in order, and those that hang in a caller's code by force."""
        self._orders = ()
        _end_workers(self._loader)
        if self._answer >= 0:
            os.close(self._answers)
            os.close(self._answer)
            self._answers, self._answer = -1, -1

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield one order per item: torch's loader asks this for its batches."""
        for order in self._orders:
            yield [order]

    def _make_loader(self) -> DataLoader[Any]:
        options = self.options
        settings: dict[str, Any] = {"generator": torch.Generator()}  # not this process's own random state
        if options.num_workers:
            parent = os.getpid() if self._answer >= 0 else None
            settings |= {
                "num_workers": options.num_workers,
                "persistent_workers": True,
                "prefetch_factor": options.prefetch_factor,
                "worker_init_fn": WorkerStart(parent, options.worker_init_fn, self._answer),
                "timeout": self.patience,
                "multiprocessing_context": _Forks(self) if parent else options.multiprocessing_context,
            }
        return DataLoader(
            self.dataset, batch_sampler=cast(Any, self), collate_fn=_only, pin_memory=options.pin_memory, **settings
        )

    def _end_hung(self) -> str:
        """Let workers write where they stand, end them, and return them in words."""
        workers = _workers_of(self._loader)
        for worker in workers:
            _show_stack(worker)
        _end_workers(self._loader)
        return f"the worker processes {', '.join(str(worker.pid) for worker in workers)} of its loader"


class _Forks(ForkContext):
    """Starts the workers of a pool, as `multiprocessing` does otherwise."""

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__()
        self.pool = pool

    def Process(self, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
        """Return a worker that is started again where it does not answer."""
        return _Worker(self.pool, partial(super().Process, *arguments, **named))


class _Worker:
    """A process, or the one after it where it did not answer."""

    def __init__(self, pool: WorkerPool, make: Callable[[], Any]) -> None:
        self.pool, self._make, self.daemon = pool, make, True
        self._process = make()

    def start(self) -> None:
        """Start it; the last worker of a pool waits until all of them answer."""
        self._start_process()
        self.pool.take_up(self)

    def start_again(self) -> None:
        """End the process, which does not answer, and start another one."""
        _show_stack(self._process)
        self._process.kill()
        self._process.join()
        self._process = self._make()
        self._start_process()

    def _start_process(self) -> None:
        time.sleep(CALM_SECONDS)
        self._process.daemon = self.daemon
        self._process.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def _show_stack(worker: Any) -> None:
    """Let a worker write where it stands."""
    if worker.is_alive():
        os.kill(worker.pid, _STACK)
        time.sleep(0.1)  # for what it writes, before another one does


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

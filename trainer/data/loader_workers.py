"""The worker processes of a caller's loader: how each begins, and how those that do not end are ended.

What they read is `trainer.data.dataset_data`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from trainer.runtime.affinity import roam
from trainer.runtime.parent_death import die_with


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Begins a worker.

    It inherits its rank's connections, so it must not outlive the rank: peers would wait for connections that nobody
    closes. Signals to a whole node or terminal are the rank's to act on; the rank ends its workers.
    """

    parent: int | None
    """The rank's process; None where another process starts the workers, which then inherit nothing of the rank."""
    own: Callable[[int], None] | None
    """The caller's ``worker_init_fn``."""

    def __call__(self, worker: int) -> None:
        """Prepare this process, which is the worker of this number."""
        if self.parent is not None:
            die_with(self.parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        roam()
        if self.own is not None:
            self.own(worker)


def worker_start(context: Any, own: Callable[[int], None] | None) -> WorkerStart:
    """Return the start of the workers of this process. ``context``: that of `multiprocessing` from which they are
    started, None for the usual one."""
    method = (context or multiprocessing).get_start_method()
    return WorkerStart(None if method == "forkserver" else os.getpid(), own)


def end_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes of a loader: in order, and those that hang in a caller's code by force."""
    iterator = getattr(loader, "_iterator", None)
    workers = list(getattr(iterator, "_workers", ()))
    if iterator is not None and workers:
        with contextlib.suppress(Exception):  # whatever one of them has left behind
            iterator._shutdown_workers()
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()
    loader._iterator = None

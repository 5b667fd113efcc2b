"""The transfer pool: a few threads that transfer the parts of one file in parallel."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

TRANSFER = "transfer"
"""Name of these threads."""


class TransferPool:
    """A transfer pool of up to ``count`` threads. Leaving its context waits for all jobs, or raises the first error.

    The thread that puts the jobs starts the threads, and they inherit its priority. They do not delay the end of the
    process, unlike those of `concurrent.futures`: storage that hangs must not keep a node that was asked to stop.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(maxsize=1)
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._cancelled = False

    def put(self, job: Callable[[], object]) -> None:
        """Queue a job; wait while every thread is busy and another job waits already. Raise the error of an earlier
        job, if there was one."""
        if self._error is not None:
            raise self._error
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=TRANSFER, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def __enter__(self) -> TransferPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancelled = kind is not None
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._cancelled or self._error is not None:
                continue  # drained, so that nobody waits for room
            try:
                job()
            except BaseException as error:
                self._error = error

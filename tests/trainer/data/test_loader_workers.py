"""Workers start while their rank has no threads, answer before they are used, and are told of where they do not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils.data import Dataset

from trainer.data import loader_workers
from trainer.data.loader_workers import ReadOptions, WorkerHungError, WorkerPool

pytestmark = pytest.mark.slow

LOCK = threading.Lock()
"""What a library might have."""


class Locked(Dataset[Any]):
    """Takes the lock for each sample, and sleeps for ever on -1."""

    def try_one(self) -> None:
        self.__getitems__([0])

    def __getitems__(self, orders: list[int]) -> list[Any]:
        with LOCK:
            if orders == [-1]:
                time.sleep(1000)
            return [(order, os.getpid()) for order in orders]


@contextmanager
def pool_of(patience: float = 0.0, **options: Any) -> Iterator[WorkerPool]:
    pool = WorkerPool(
        Locked(), ReadOptions(num_workers=2, multiprocessing_context="fork", **options), rank=3, patience=patience
    )
    try:
        yield pool
    finally:
        pool.close()


def test_workers_that_inherit_a_lock_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_workers, "START_SECONDS", (0.7, 20.0))
    LOCK.acquire()
    with pool_of() as pool:
        threading.Timer(0.2, LOCK.release).start()
        pool.start()
        read = list(pool.read(iter(range(6))))
        assert [order for order, _ in read] == list(range(6))
        workers = {pid for _, pid in read}
        assert len(workers) == 2
        assert os.getpid() not in workers
        assert {pid for _, pid in pool.read(iter(range(4)))} == workers, "they stay"


def test_workers_that_never_answer_are_told_by_their_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader_workers, "START_SECONDS", (0.5, 0.6))
    with LOCK, pool_of() as pool:
        words = r"rank 3: a worker process of its loader did not read a sample within 0\.6 s, though"
        with pytest.raises(WorkerHungError, match=words):
            pool.start()
    assert "in __getitems__" in capfd.readouterr().err, "its stack"


def test_a_worker_that_hangs_later_is_told_after_the_patience(capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of(patience=1.0) as pool:
        pool.start()
        coming = pool.read(iter([5, -1, 6]))
        assert next(coming)[0] == 5
        with pytest.raises(WorkerHungError, match=r"rank 3: .* did not answer for 1 s while they read samples"):
            list(coming)
    assert "in __getitems__" in capfd.readouterr().err


def test_the_callers_own_timeout_comes_first() -> None:
    with pool_of(patience=1.0, timeout=7.0) as pool:
        assert pool.patience == 7.0

"""Workers stay, and are told of where they do not answer."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, _utils, get_worker_info

from trainer.comm.launcher_env import RankFacts
from trainer.config import DistributedTrainingConfig
from trainer.data.dataset_data import DatasetData
from trainer.data.torch_loader import INLINE_BYTES, ReadOptions, WorkerPool
from trainer.errors import WorkerHungError

pytestmark = pytest.mark.slow

LOCK = threading.Lock()
"""What a library might have."""


class Locked(Dataset[Any]):
    """Takes the lock for each sample, and sleeps for ever on -1."""

    def __getitems__(self, orders: list[int]) -> list[Any]:
        with LOCK:
            if orders == [None]:
                raise TypeError("no order")
            if orders == [-1]:
                time.sleep(1000)
            return [(order, os.getpid()) for order in orders]


@pytest.fixture(autouse=True)
def _quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits so long for each worker to end in order, and as long again once it has asked it to: those that hang
    here do neither."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


class Kinds(Dataset[Any]):
    """Yields a tensor of each kind that is sent in its own way."""

    def __getitems__(self, orders: list[int]) -> list[Any]:
        large = torch.arange(INLINE_BYTES // 8 + 1)
        mapping = {"row": torch.arange(6.0).view(2, 3), "one": torch.tensor(7), "array": np.arange(3)}
        half, across = torch.ones(3, dtype=torch.bfloat16), torch.arange(6).view(2, 3).t()
        return [(mapping, [large, half, across, torch.tensor([1 + 2j]).conj()])]


@contextmanager
def pool_of(patience: float = 0.0, **options: Any) -> Iterator[WorkerPool]:
    pool = WorkerPool(
        Locked(), ReadOptions(num_workers=2, multiprocessing_context="fork", **options), rank=3, patience=patience
    )
    try:
        yield pool
    finally:
        pool.close()


def test_workers_stay() -> None:
    with pool_of() as pool:
        pool.start()
        read = list(pool.read(iter(range(6))))
        assert [order for order, _ in read] == list(range(6))
        workers = {pid for _, pid in read}
        assert len(workers) == 2
        assert os.getpid() not in workers
        assert {pid for _, pid in pool.read(iter(range(4)))} == workers


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_small_tensors_come_by_value_and_all_as_they_are(context: str) -> None:
    pool = WorkerPool(Kinds(), ReadOptions(num_workers=1, multiprocessing_context=context), rank=0, patience=30.0)
    try:
        ((mapping, others),) = pool.read(iter([0]))
    finally:
        pool.close()
    expected, others_expected = Kinds().__getitems__([0])[0]
    torch.testing.assert_close((mapping, others), (expected, others_expected), rtol=0, atol=0)
    assert [each.stride() for each in others] == [each.stride() for each in others_expected]
    assert isinstance(mapping["array"], np.ndarray)
    assert not mapping["row"].is_shared()
    assert others[0].is_shared()
    mapping["row"] += 1  # as a model may


def test_workers_that_inherit_a_lock_are_told_by_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with LOCK, pool_of(patience=1.0) as pool:
        pool.start()
        with pytest.raises(WorkerHungError, match=r"rank 3: .* did not answer for 1 s .* multiprocessing_context="):
            list(pool.read(iter(range(2))))
    assert "in __getitems__" in capfd.readouterr().err, "its stack"


def test_a_worker_that_hangs_later_is_told_after_the_patience(capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of(patience=1.0) as pool:
        pool.start()
        coming = pool.read(iter([5, -1, 6]))
        assert next(coming)[0] == 5
        with pytest.raises(WorkerHungError, match=r"rank 3: .* did not answer for 1 s while they read samples"):
            list(coming)
    assert "in __getitems__" in capfd.readouterr().err


def test_workers_that_read_nothing_more_are_ended_by_an_error() -> None:
    with pool_of() as pool:
        pool.start()
        assert len(multiprocessing.active_children()) == 2
        with pytest.raises(TypeError, match="worker process"):
            list(pool.read(iter([1, None, 2])))
        assert not multiprocessing.active_children()


class Opened(Dataset[Any]):
    """Has a file, which each worker has to open by itself."""

    file = ""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, position: int) -> tuple[int, str]:
        return position, self.file


def open_file(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.file += f"{len(info.dataset)} of {os.getpid()}"


def test_each_split_has_the_workers_that_it_asks_for() -> None:
    ways = [ReadOptions(num_workers=number, worker_init_fn=open_file) for number in (1, 1, 2)]
    options = dict(zip(("train", "valid", "test"), ways, strict=True))
    data = DatasetData(Opened(), Opened(), Opened(), options, name="opened")
    data.start_workers(DistributedTrainingConfig(batch_size_per_gpu=1, world_size=1), RankFacts())
    try:
        assert len(multiprocessing.active_children()) == 4
        for split, count in (("valid", 1), ("test", 2)):
            read = [each[1][0] for each in data.read_each(split, list(np.arange(8)[:, None]), torch.device("cpu"))]
            assert len(set(read)) == count
            assert all(re.fullmatch(r"8 of \d+", file) for file in read), "set once, in the caller's own dataset"
    finally:
        data.close()


def test_the_callers_own_timeout_comes_first() -> None:
    with pool_of(patience=1.0, timeout=7.0) as pool:
        assert pool.patience == 7.0

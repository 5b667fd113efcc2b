from __future__ import annotations

import threading

import pytest

from trainer.storage.base import TransferPool


def test_jobs_are_done_side_by_side_and_all_before_the_end() -> None:
    both = threading.Barrier(2)
    done: list[int] = []
    with TransferPool(2) as pool:
        pool.put(both.wait)  # each waits for the other
        pool.put(both.wait)
        for number in range(20):
            pool.put(lambda number=number: done.append(number))
    assert sorted(done) == list(range(20))


def test_nothing_happens_without_jobs() -> None:
    before = threading.active_count()
    with TransferPool(4):
        assert threading.active_count() == before


def test_an_error_comes_out_at_once_and_what_follows_is_left() -> None:
    done: list[int] = []

    def fill(pool: TransferPool) -> None:
        pool.put(lambda: 1 // 0)
        for number in range(5):
            pool.put(lambda number=number: done.append(number))

    with pytest.raises(ZeroDivisionError), TransferPool(1) as pool:
        fill(pool)
    assert len(done) < 3


def test_an_error_of_the_last_job_is_raised_too() -> None:
    with pytest.raises(ZeroDivisionError), TransferPool(3) as pool:
        pool.put(lambda: 1 // 0)


def test_where_the_block_fails_what_waits_is_left_and_its_error_counts() -> None:
    started, go_on, done = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        started.set()
        go_on.wait()

    def leave() -> None:
        with TransferPool(1) as pool:
            pool.put(first)
            started.wait()
            pool.put(lambda: done.append(1))
            threading.Timer(0.05, go_on.set).start()
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        leave()
    assert done == []

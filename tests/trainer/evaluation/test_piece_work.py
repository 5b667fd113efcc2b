"""Work in pieces, by ranks that are threads here: their world fails for all of them when one is lost, as a real one."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from market import Market

from trainer.comm.group import GroupError
from trainer.comm.world import World
from trainer.evaluation import baselines
from trainer.evaluation.judged_baselines import BaselineJudgement
from trainer.evaluation.piece_work import Array, PieceWork, Stage, Standing, on_grid, plan_round
from trainer.evaluation.shared_work import SharedWork

DONE = Standing(stage=1, shape=(2,), pieces=0, held=(), most=1)


def at(stage: int, *held: int, most: int = 1) -> Standing:
    return Standing(stage=stage, shape=(3,), pieces=5, held=held, most=most)


def test_pieces_that_are_left_are_shared() -> None:
    plan = plan_round([at(0, 2, most=9), at(0, most=0), at(0, 4, most=9)])
    assert plan.pieces == ((0,), (), (1, 3))
    assert (plan.behind, plan.dropped, plan.is_complete) == ((), (), False)
    assert plan_round([at(0), at(0)]).pieces == ((0,), (2,)), "one each"


def test_who_is_behind_takes_the_result_of_the_first_that_is_not() -> None:
    plan = plan_round([at(0, 0, 1), at(1), at(1, 3)])
    assert (plan.stage, plan.source, plan.behind) == (1, 1, (0,))
    assert 3 not in {piece for share in plan.pieces for piece in share}
    assert plan_round([at(0), DONE]).source == 1


def test_a_piece_counts_once() -> None:
    """As where a rank comes back whose pieces others have done again meanwhile."""
    plan = plan_round([at(0, 0, 1), at(0, 1, 2), at(0, 3)])
    assert plan.dropped == (1,)
    assert sorted(piece for share in plan.pieces for piece in share) == [2, 4]


def test_all_pieces_are_there_though_no_rank_has_all() -> None:
    assert plan_round([at(0, 0, 4), at(0, 1, 2, 3)]).is_complete


def test_sums_on_the_grid_are_exact_in_any_order() -> None:
    values = on_grid(np.random.default_rng(0).normal(scale=1e4, size=50))
    sums = {float(np.random.default_rng(seed).permutation(values).cumsum()[-1]) for seed in range(50)}
    assert len(sums) == 1
    assert np.abs(values - on_grid(values)).max() == 0


@dataclass
class Threads:
    """A world of threads. ``lost_at``: the rank and the number of its collective at which it is lost."""

    size: int
    lost_at: tuple[int, int] | None = None
    places: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [None] * self.size
        self.meeting = threading.Barrier(self.size)

    def of(self, rank: int) -> SharedWork:
        return SharedWork(cast(World, Member(self, rank)))


class Member:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.world_size = threads, rank, threads.size
        self._calls = itertools.count()

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._exchange(json.loads(json.dumps(value)))

    def _exchange(self, value: Any) -> list[Any]:
        if self.threads.lost_at == (self.rank, next(self._calls)):
            self.threads.meeting.abort()
        try:
            self.threads.meeting.wait(60)
            self.threads.places[self.rank] = value
            self.threads.meeting.wait(60)
            found = list(self.threads.places)
            self.threads.meeting.wait(60)
        except threading.BrokenBarrierError:
            raise GroupError("a peer is lost") from None
        return found

    def barrier(self) -> None:
        self.all_gather_object(None)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        mine = values.clone()
        values.zero_()  # as a sum that fails may leave it
        found = self._exchange(mine)
        for each in found:
            values += each
        return values


def in_threads(count: int, action: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(action, range(count)))


class Counted:
    """Two stages: the sum of squares, and numbers that it is added to, each in its place; and who did which piece."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.work = PieceWork((self._squares, self._places))

    def _squares(self, _: Array) -> Stage:
        def add(piece: int, sums: Array) -> None:
            self.done.append((0, piece))
            sums += on_grid(np.array([piece**2 / 7]))

        return Stage(11, (1,), add, lambda sums: sums / 2)

    def _places(self, start: Array) -> Stage:
        def add(piece: int, sums: Array) -> None:
            self.done.append((1, piece))
            sums[piece] = start[0] + piece

        return Stage(5, (5,), add, lambda sums: sums)


EXPECTED = sum(on_grid(np.array([piece**2 / 7]))[0] for piece in range(11)) / 2 + np.arange(5)


def rounds(most: int) -> Callable[[], bool]:
    left: Iterator[int] = iter(range(most))
    return lambda: next(left, None) is not None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("most", [0, 2, 4, 40])
def test_work_that_was_interrupted_goes_on_where_it_was(size: int, most: int) -> None:
    members, world = [Counted() for _ in range(size)], Threads(size)
    shared = [world.of(rank) for rank in range(size)]
    finished = in_threads(
        size, lambda rank: members[rank].work.advance(shared[rank], rounds(most), is_worker=rank > 0 or size == 1)
    )
    assert finished == [most == 40] * size
    if size > 1:
        assert not members[0].done, "rank 0 had other things to do"
    results = in_threads(size, lambda rank: members[rank].work.complete(shared[rank]))
    assert all(np.array_equal(result, EXPECTED) for result in results)
    assert sorted(itertools.chain.from_iterable(member.done for member in members)) == [
        *((0, piece) for piece in range(11)), *((1, piece) for piece in range(5))
    ]  # fmt: skip


@pytest.mark.parametrize("call", range(1, 14))
def test_a_lost_rank_costs_its_pieces_and_one_that_comes_catches_up(call: int) -> None:
    members = [Counted() for _ in range(3)]

    def begin(rank: int) -> None:
        world = first.of(rank)
        try:
            members[rank].work.advance(world, lambda: True)
            members[rank].work.complete(world)
        except GroupError:
            pass

    first = Threads(3, lost_at=(1, call))
    in_threads(3, begin)
    members[1] = Counted()  # another comes in its place
    before = [list(member.done) for member in members]
    second = Threads(3)
    results = in_threads(3, lambda rank: members[rank].work.complete(second.of(rank)))
    assert all(np.array_equal(result, EXPECTED) for result in results)
    again = sum(len(member.done) - len(old) for member, old in zip(members, before, strict=True))
    assert again <= 16 - len(before[0]) - len(before[2]), "what survivors had done was kept"
    assert all(len(set(member.done)) == len(member.done) for member in members)


def test_scores_of_baselines_are_the_same_however_they_were_made(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "CHUNK", 97)
    alone = BaselineJudgement(market, "test").scores(SharedWork())
    for size, most in ((1, 30), (2, 7), (3, 12)):
        world = Threads(size)
        shared = [world.of(rank) for rank in range(size)]
        judged = [BaselineJudgement(market, "test") for _ in range(size)]

        def judge(rank: int) -> Any:
            judged[rank].work.advance(shared[rank], rounds(most), is_worker=rank > 0)  # noqa: B023 - called at once
            return judged[rank].scores(shared[rank])  # noqa: B023

        for scores in in_threads(size, judge):
            assert list(scores) == list(alone)
            for name, score in scores.items():
                assert (score.means, score.mse_to_zero) == (alone[name].means, alone[name].mse_to_zero), name
                np.testing.assert_array_equal(score.nll, alone[name].nll)

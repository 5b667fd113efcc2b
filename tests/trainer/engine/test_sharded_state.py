"""Trainings whose ranks share the model: where the state is to be had when the world changes, and how all ranks decide
alike about a checkpoint, which is a collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from thread_worlds import on_two_ranks

from trainer.comm.world import World
from trainer.engine.joining import save_start
from trainer.engine.session import Session
from trainer.engine.sharded import Holding, Sources, find_sources, find_start, is_behind

FRESH = Holding(is_fresh=True)


def held(place: int, step: int = 7, size: int = 2, **more: bool | int) -> Holding:
    return Holding(is_fresh=False, size=size, place=place, step=step, **more)  # type: ignore[arg-type]


def test_a_survivor_for_each_place_is_enough() -> None:
    assert find_sources([held(1), FRESH, held(0), held(0)]) == Sources(7, 2, (2, 0), 0)


def test_rows_that_nobody_holds_are_lost() -> None:
    assert find_sources([held(0), held(0), FRESH]) is None
    assert find_sources([held(0), held(1, size=4)]) is None, "rows of another division"
    assert find_sources([held(0), held(1, step=6)]) is None, "they are of a step before"
    assert find_sources([FRESH, FRESH]) is None


def test_who_has_missed_the_news_of_a_commit_does_the_step_by_itself() -> None:
    late = held(1, step=6, awaits_commit=True)
    assert find_sources([held(0), late]) == Sources(7, 2, (0, 1), 0)
    assert is_behind(late, 7)
    assert not is_behind(late, 6), "if nobody has done that step, it is done again"
    assert not is_behind(late, 8)


def test_who_has_done_the_step_comes_before_who_has_yet_to_do_it() -> None:
    late = held(0, step=6, awaits_commit=True)
    assert find_sources([late, held(0), held(1)]) == Sources(7, 2, (1, 2), 1)


def test_the_progress_of_the_last_evaluation_counts() -> None:
    found = find_sources([held(0, evaluated=5), held(1, evaluated=7)])
    assert found == Sources(7, 2, (0, 1), 1)


def test_before_the_first_step_whoever_has_the_whole_model_gives_it_out() -> None:
    """A rank whose world has failed as it formed may hold rows already, of which nobody has the others."""
    divided = Holding(is_fresh=True, size=3, place=1)
    assert find_sources([divided, FRESH]) is None
    assert find_start([divided, Holding(is_fresh=True, has_start=True)]) == Sources(0, 1, (1,), 1)
    assert find_start([divided, FRESH]) is None
    kept = Holding(is_fresh=False, size=3, place=1, has_start=True)
    assert find_start([kept, FRESH]) == Sources(0, 1, (0,), 0)
    assert find_start([kept, held(0, step=1)]) is None, "what was done since is not to be forgotten in silence"


def session_of(world: World, start: Any, step: int | None) -> Any:
    checkpoints = SimpleNamespace(wait=lambda seconds: True, committed_step=lambda: step)
    return SimpleNamespace(
        world=world, step=SimpleNamespace(divides_parameters=True), progress=SimpleNamespace(step=0),
        state=SimpleNamespace(start=start), checkpoints=checkpoints, save=lambda: None
    )  # fmt: skip


def test_a_newcomer_without_a_start_of_its_own_waits_with_the_others() -> None:
    def work(world: World) -> Any:
        session = session_of(world, {"w": 1} if world.rank == 0 else None, step=0)
        save_start(session)
        world.barrier()  # both are at the same place of the order of collectives
        return session.state.start

    assert on_two_ranks(work) == [None, None]


def test_what_a_rank_began_with_is_kept_until_the_checkpoint_counts() -> None:
    def work(world: World) -> Any:
        session = session_of(world, {"w": world.rank}, step=None if world.rank == 0 else 0)
        save_start(session)
        return session.state.start

    assert on_two_ranks(work) == [{"w": 0}, {"w": 1}]


@pytest.mark.parametrize(
    ("is_best", "wait", "is_over", "left_out"),
    [
        (False, False, False, True),
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
    ],
)
def test_all_ranks_leave_it_out_or_none_and_the_best_and_the_last_are_waited_for(
    is_best: bool, wait: bool, is_over: bool, left_out: bool
) -> None:
    def work(world: World) -> Any:
        others = SimpleNamespace(has_room=False)  # two are still being written, until somebody waits for them

        def finish(seconds: float) -> bool:
            others.has_room = True
            return True

        others.wait = finish
        session: Any = SimpleNamespace(world=world, is_over=is_over, checkpoints=others)
        taken, best_is_saved = Session._agree_to_save(session, world.rank == 0, is_best or wait or is_over, True)
        assert best_is_saved
        return not taken

    assert on_two_ranks(work) == [left_out, left_out]

"""Where the state of a sharded training is to be had when its world changes."""

from __future__ import annotations

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

"""Whether a checkpoint that is a collective is left out: all ranks decide alike, as rank 0 has room for it or not."""

from __future__ import annotations

from typing import Any

import pytest
from two_ranks import on_two_ranks

from trainer.comm.world import World
from trainer.engine.session import Session


class Checkpoints:
    """Two others are still being written, until somebody waits for them."""

    def __init__(self) -> None:
        self.has_room = False

    def wait(self, seconds: float) -> bool:
        self.has_room = True
        return True


class SavingSession:
    """As much of a session as the decision needs."""

    def __init__(self, world: World, is_over: bool) -> None:
        self.world, self.is_over, self.checkpoints = world, is_over, Checkpoints()


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
        session: Any = SavingSession(world, is_over)
        taken, best_is_saved = Session._agree_to_save(session, world.rank == 0, is_best or wait or is_over, True)
        assert best_is_saved
        return not taken

    assert on_two_ranks(work) == [left_out, left_out]

"""The checkpoint before the first step: all ranks wait until it counts, whatever each of them remembers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from two_ranks import on_two_ranks

from trainer.comm.world import World
from trainer.engine.recovery import save_start


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

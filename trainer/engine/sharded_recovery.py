"""A sharded training in another world: who holds which rows, where lost ones come from, and the model as a whole.

How ranks agree on a new world, and the recovery of an unsharded training, is `trainer.engine.recovery`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor

from trainer.comm.world import World
from trainer.engine.module_state import take_buffers
from trainer.engine.sharded_state import (
    BEST,
    WEIGHTS,
    Holding,
    find_sources,
    find_start,
    give_start,
    is_behind,
    move_rows,
    pass_whole,
    present_sources,
    rows_of,
    sharded_of,
)
from trainer.engine.state import TrainingState, read_progress
from trainer.parallel.replicas import ReplicaPlan, plan_replicas

_log = logging.getLogger(__name__)


def plan_world(world: World, strategy: str) -> ReplicaPlan:
    """Return the replicas of a world. A collective."""
    nodes = world.all_gather_object(world.node_rank)
    plan = plan_replicas(strategy, nodes, can_divide=world.topology == "mesh")
    if world.rank == 0:
        _log.info("%d ranks hold %d copies of the model, each over %d", len(nodes), len(plan.replicas), plan.size)
    return plan


def bring_rows(
    state: TrainingState, world: World, plan: ReplicaPlan, is_fresh: bool, load: Callable[[], dict[str, Any] | None]
) -> bool:
    """Hold this rank's rows of the furthest state that ranks have. Where none has one, or rows of it are lost, take
    those of the state that ``load`` returns on every rank; where there is none either, a rank's model at the start.
    Return whether a loaded state was taken. A collective."""
    sharded = sharded_of(state)
    place, size = plan.place_of(world.rank), plan.size
    mine = Holding(
        is_fresh=is_fresh,
        size=sharded.size,
        place=sharded.place,
        step=state.progress.step,
        awaits_commit=state.step.awaits_commit == state.progress.step,
        evaluated=state.progress.evaluated_step,
        has_start=sharded.is_whole or state.start is not None,
    )
    holdings = [Holding(**item) for item in world.all_gather_object(asdict(mine))]
    sources = find_sources(holdings)
    if sources is None:
        loaded = load()
        if loaded is not None:
            state.restore_rows(loaded, place, size)
            return True
        start = find_start(holdings)
        if start is None:
            raise RuntimeError("rows of the model are lost with their ranks, and there is no checkpoint to go back to")
        give_start(state, world, start, place, size)
        return False
    if is_behind(mine, sources.step):
        state.step.update()
    progress = read_progress(world.all_gather_object(asdict(state.progress))[sources.reader])
    if not is_fresh and progress.best_step != state.progress.best_step and progress.best_step == progress.step:
        state.keep_best()  # the others have just found these weights to be the best
    state.progress = progress
    all_stay = all(
        not item.is_fresh and (item.size, item.place) == (size, plan.place_of(rank))
        for rank, item in enumerate(holdings)
    )
    if not all_stay:
        move_rows(state, world, sources, place, size)
    return False


@contextmanager
def as_whole(state: TrainingState, world: World, plan: ReplicaPlan) -> Iterator[None]:
    """Let the model be a whole, with all its weights, on every rank. Afterwards each rank holds its rows as before. A
    collective."""
    rows = _keep_rows(state)
    try:
        _become_whole(state, world, plan, WEIGHTS)
        yield
    finally:
        hold_rows_again(state, rows)
        state.step.adopt_replicas(world, plan)


def hold_best(state: TrainingState, world: World, plan: ReplicaPlan) -> dict[str, Any]:
    """Make the model a whole of the best weights on every rank, of the last where there are no best ones. Return what
    `hold_rows_again` needs to go back. A collective."""
    rows = _keep_rows(state)
    try:
        _become_whole(state, world, plan, WEIGHTS if state.best is None else BEST)
    except BaseException:
        hold_rows_again(state, rows)
        raise
    return rows


def hold_rows_again(state: TrainingState, kept: dict[str, Any]) -> None:
    """Let each rank hold its rows as before; the passes need `TrainingStep.adopt_replicas` then."""
    sharded = sharded_of(state)
    sharded.shard(kept["place"], kept["size"], kept["rows"])
    state.step.hold_rows(*kept["moments"])
    take_buffers(sharded.module, kept["buffers"])


def _keep_rows(state: TrainingState) -> dict[str, Any]:
    sharded = sharded_of(state)
    state.step.sync.unwrap()
    return {
        "place": sharded.place,
        "size": sharded.size,
        "rows": sharded.rows,
        "moments": state.step.moments_of_rows(),
        "buffers": {name: buffer.clone() for name, buffer in sharded.module.named_buffers()},
    }


def _become_whole(state: TrainingState, world: World, plan: ReplicaPlan, kind: str) -> None:
    """Make the model a whole on every rank, of weights of this kind. A collective."""
    sharded = sharded_of(state)
    sources = present_sources(world, sharded, plan.replicas[0])
    mine = rows_of(state)[kind]
    whole: dict[str, Tensor] = {name: pass_whole(world, sharded, name, mine[name], sources) for name in sharded.shapes}
    sharded.make_whole(whole)
    if kind == BEST:
        assert state.best is not None
        take_buffers(sharded.module, state.best)

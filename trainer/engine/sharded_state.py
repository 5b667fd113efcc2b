"""The state of a sharded training: the rows of this rank, their part of a checkpoint, and their way into another world.

A rank holds rows of four kinds: weights, two moments, and the best weights so far. When ranks are divided otherwise, or
a newcomer has none, each whole parameter passes by all ranks, one after the other, from the ranks that hold its rows;
no rank needs the memory of a whole model for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.checkpoint.parts import MOMENTS
from trainer.comm.world import World
from trainer.engine.module_state import share_module_state, take_buffers
from trainer.engine.state_passing import pass_state
from trainer.engine.step import TrainingStep
from trainer.parallel.replicas import row_range
from trainer.parallel.sharding import ShardedModel

WEIGHTS, BEST = "weights", "best"
KINDS = (WEIGHTS, *MOMENTS, BEST)


class RowState(Protocol):
    """What `trainer.engine.state.TrainingState` has that belongs to rows."""

    step: TrainingStep
    progress: Any
    best: dict[str, Tensor] | None
    start: dict[str, Tensor] | None

    def grown(self) -> dict[str, list[str] | None]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a rank brings into a new world."""

    is_fresh: bool
    """Whether it has no state that counts."""
    size: int = 1
    """The ranks that held one copy of the model together, this one among them."""
    place: int = 0
    """Its place among them."""
    step: int = 0
    awaits_commit: bool = False
    """Whether it can do the next step by itself, since only the news that all have agreed on it is missing here."""
    evaluated: int = 0
    """The last step after which it has evaluated."""
    has_start: bool = False
    """Whether it has the whole model as it was before the first step."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a whole state is to be had."""

    step: int
    size: int
    holders: tuple[int, ...]
    """The rank that holds the rows of each place."""
    reader: int
    """The rank whose progress and buffers all take over."""


def find_sources(holdings: Sequence[Holding]) -> Sources | None:
    """Return where the furthest state is to be had, None where rows of it are lost, or nobody has a state. Ranks that
    only wait for the commit of that state's last step count as having done it. Pure."""
    furthest = max((item.step for item in holdings if not item.is_fresh), default=None)
    if furthest is None:
        return None
    done = [rank for rank, item in enumerate(holdings) if not item.is_fresh and item.step == furthest]
    reader = max(done, key=lambda rank: (holdings[rank].evaluated, -rank))
    size = holdings[reader].size
    holders = []
    for place in range(size):
        has_rows = [
            rank
            for rank, item in enumerate(holdings)
            if (item.size, item.place) == (size, place) and (rank in done or is_behind(item, furthest))
        ]
        if not has_rows:
            return None
        holders.append(min(has_rows, key=lambda rank: (rank not in done, rank)))
    return Sources(furthest, size, tuple(holders), reader)


def find_start(holdings: Sequence[Holding]) -> Sources | None:
    """Return where the model is to be had as it was before the first step; None where nobody has it, or a step has been
    done. Pure."""
    first = next((rank for rank, item in enumerate(holdings) if item.has_start), None)
    return None if first is None or any(item.step for item in holdings) else Sources(0, 1, (first,), first)


def is_behind(item: Holding, furthest: int) -> bool:
    """Return whether a rank has yet to do the last step of the furthest state, and can do it by itself. Pure."""
    return not item.is_fresh and item.awaits_commit and item.step + 1 == furthest


def sharded_of(state: RowState) -> ShardedModel:
    """Return the model of a training whose ranks share it."""
    assert state.step.sharded is not None
    return state.step.sharded


def rows_of(state: RowState) -> dict[str, dict[str, Tensor]]:
    """Return the rows of this rank, by kind and by name; kinds that there are not yet are left out."""
    sharded = sharded_of(state)
    moments, _ = state.step.moments_of_rows()
    found = {WEIGHTS: sharded.rows, **{kind: rows for kind, rows in moments.items() if rows}}
    if state.best is not None:
        found[BEST] = {name: state.best[name] for name in sharded.shapes}
    return found


def keep_best_rows(state: RowState) -> dict[str, Tensor]:
    """Return copies of the present rows and buffers, on the CPU."""
    sharded = sharded_of(state)
    kept = sharded.rows | buffers_of(sharded.module)
    return {name: tensor.detach().cpu().clone() for name, tensor in kept.items()}


def keep_start(state: RowState) -> None:
    """Keep the whole model as it is before the first step, until its first checkpoint counts: when ranks are lost
    before that, it is given out again."""
    sharded = sharded_of(state)
    if state.start is None:
        state.start = {name: rows.cpu().clone() for name, rows in sharded.rows.items()}


def give_start(state: RowState, world: World, sources: Sources, place: int, size: int) -> None:
    """Hold the rows of this place of the model as it was before the first step. A collective."""
    sharded = sharded_of(state)
    if world.rank == sources.reader and not sharded.is_whole:
        assert state.start is not None
        sharded.make_whole(state.start)
    if sharded.is_whole:
        keep_start(state)
    move_rows(state, world, sources, place, size)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module that belong to its state, by name."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in parameters}


def capture_part(state: RowState, best_is_saved: bool) -> dict[str, Any]:
    """Return this rank's part of a checkpoint, see `trainer.checkpoint.parts`. The tensors are the live ones."""
    sharded = sharded_of(state)
    rows = rows_of(state)
    _, updates = state.step.moments_of_rows()
    if best_is_saved:
        rows.pop(BEST, None)
    names = set(sharded.shapes)
    [group] = state.step.optimizer.state_dict()["param_groups"]
    return {
        "place": sharded.place,
        "size": sharded.size,
        "rows": {**{kind: {} for kind in MOMENTS}, **rows},
        "aliases": sharded.aliases,
        "updates": updates,
        "groups": [{**group, "params": list(range(len(names)))}],
        "buffers": buffers_of(sharded.module),
        "best_buffers": {name: value for name, value in (state.best or {}).items() if name not in names},
        "order": list(sharded.module.state_dict()),
        "grown": state.grown(),
        "progress": asdict(state.progress),
    }


def take_whole_state(state: RowState, whole: Mapping[str, Any], place: int, size: int) -> None:
    """Hold the rows of this place of a state that an unsharded training has saved, without its progress."""
    sharded = sharded_of(state)
    moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in MOMENTS}
    updates = 0.0
    for number, name in enumerate(sharded.shapes):
        of_one = whole["step"]["optimizer"]["state"].get(number)
        if of_one:
            updates = max(updates, float(of_one["step"]))
            for kind in MOMENTS:
                moments[kind][name] = sharded.take_rows(name, of_one[kind], place, size)
    rows = {name: sharded.take_rows(name, whole["model"][name], place, size) for name in sharded.shapes}
    take_buffers(sharded.module, whole["model"])
    sharded.shard(place, size, rows)
    state.step.hold_rows(moments, round(updates))
    state.best = None
    if best := whole.get("best"):
        state.best = cut_best(sharded, best)


def cut_best(sharded: ShardedModel, best: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's rows of whole best weights, and their buffers, on the CPU."""
    found = {name: sharded.take_rows(name, best[name], sharded.place, sharded.size).cpu() for name in sharded.shapes}
    return found | {name: best[name].cpu().clone() for name in buffers_of(sharded.module)}


def move_rows(state: RowState, world: World, sources: Sources, place: int, size: int) -> None:
    """Hold the rows of this place, taken from the ranks that have them. A collective."""
    sharded = sharded_of(state)
    mine = rows_of(state)
    _, done = state.step.moments_of_rows()
    known: list[Any] = world.all_gather_object([[kind for kind in KINDS if kind in mine], done])
    kinds, updates = known[sources.reader]
    kept: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    for kind in kinds:
        for name in sharded.shapes:
            if kind in MOMENTS and name not in sharded.trained:
                continue
            whole = pass_whole(world, sharded, name, mine.get(kind, {}).get(name), sources)
            taken = sharded.take_rows(name, whole, place, size)
            kept[kind][name] = taken.cpu() if kind == BEST else taken
    share_module_state(sharded.module, world, sources.reader)
    sharded.shard(place, size, kept[WEIGHTS])
    state.step.hold_rows({kind: kept.get(kind, {}) for kind in MOMENTS}, updates)
    before, state.best = state.best, None
    if BEST in kept:
        buffers = {name: value.cpu().clone() for name, value in buffers_of(sharded.module).items()}
        if before is not None:
            buffers |= {name: before[name] for name in buffers if name in before}
        passed = pass_state(world, sources.reader, range(world.world_size), lambda: buffers)
        state.best = kept[BEST] | (buffers if passed is None else passed)


def pass_whole(world: World, sharded: ShardedModel, name: str, mine: Tensor | None, sources: Sources) -> Tensor:
    """Return a whole parameter, or another tensor of its shape, on the CPU, from the ranks that hold its rows. A
    collective."""
    shape = sharded.shapes[name]
    whole = torch.empty(shape, dtype=sharded.dtype)
    for place, holder in enumerate(sources.holders):
        first, last = row_range(shape[0], place, sources.size)
        if first == last:
            continue
        part = whole[first:last]
        if world.rank == holder:
            assert mine is not None
            part.copy_(mine)
        world.broadcast(part, holder)
    return whole


def present_sources(world: World, sharded: ShardedModel, replica: Sequence[int]) -> Sources:
    """Return the sources of the state that all ranks have now: the ranks of one replica."""
    return Sources(0, sharded.size, tuple(replica), replica[0])

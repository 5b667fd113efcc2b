"""A training whose ranks share the model: its step, the rows of this rank, their part of a checkpoint, their way into
another world, and the model as a whole.

A rank holds rows of some kinds: weights, what the optimizer keeps of them (with AdamW two moments), and the best
weights so far. When ranks are divided otherwise, or
a newcomer has none, each whole parameter passes by all ranks, one after the other, from the ranks that hold its rows;
no rank needs the memory of a whole model for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.state_passing import pass_state
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.engine.module_state import share_module_state, take_buffers
from trainer.engine.state import Entry, Loaded, TrainingState, read_progress
from trainer.engine.step import TrainingStep
from trainer.model.blocks import find_blocks
from trainer.model.optimizers import USUAL, OptimizerRecipe, is_like
from trainer.model.task import Task
from trainer.parallel.replicas import ReplicaPlan, plan_replicas, row_range
from trainer.parallel.shard_collectives import ShardSynchronizer
from trainer.parallel.sharding import ShardedModel
from trainer.runtime.fault_injection import Faults

WEIGHTS, BEST = "weights", "best"
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class OptimizerRows:
    """What an optimizer keeps of the rows of a rank."""

    rows: dict[str, dict[str, Tensor]]
    """Tensors like the rows, such as moments: by kind, then by name of the parameter."""
    scalars: dict[str, dict[str, Any]]
    """By name of the parameter: values such as the number of updates, which are equal on all ranks."""
    options: Mapping[str, Any] | None
    """See `ScheduledOptimizer.options`; None: as they were made."""


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


class ShardedStep(TrainingStep):
    """An optimizer step on this rank's rows."""

    is_divided = divides_parameters = True

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        config: DistributedTrainingConfig,
        device: torch.device,
        faults: Faults,
        recipe: OptimizerRecipe = USUAL,
        total_steps: int = 0,
    ) -> None:
        self.sharded = ShardedModel(module, find_blocks(module), config, device)
        self.plan = ReplicaPlan(((0,),))
        """How the ranks of the present world hold the model."""
        super().__init__(module, task, config, device, faults, recipe, total_steps)

    def adopt(self, world: World) -> None:
        """Work in this world from now on. The model holds its rows by `plan` already."""
        self.sync.unwrap()
        self.world, self.awaits_commit = world, None
        self.sharing = self.plan.size
        self.sync = ShardSynchronizer(world, self.plan, self.sharded, self.faults, self.timer)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def hold_rows(self, kept: OptimizerRows) -> None:
        """Update the rows that the model holds now, with what an optimizer has kept of them."""
        with self.sharded.holding_rows():
            self.scheduled = self._make_optimizer()
        tensors = {
            place: kept.scalars.get(name, {}) | {kind: rows[name] for kind, rows in kept.rows.items() if name in rows}
            for place, name in enumerate(self.sharded.shapes)
        }
        self.scheduled.load({place: found for place, found in tensors.items() if found}, kept.options)

    def optimizer_rows(self) -> OptimizerRows:
        """Return what the optimizer keeps of this rank's rows."""
        found = OptimizerRows({}, {}, self.scheduled.options())
        tensors = self.scheduled.tensors()
        for place, name in enumerate(self.sharded.shapes):
            for kind, value in tensors.get(place, {}).items():
                if is_like(value, self.scheduled.parameters[place]):
                    found.rows.setdefault(kind, {})[name] = value
                else:
                    found.scalars.setdefault(name, {})[kind] = value
        return found


class ShardedState(TrainingState):
    """Everything that changes during training, of which this rank holds its rows."""

    def __init__(self, step: ShardedStep) -> None:
        super().__init__(step)
        self.step: ShardedStep = step
        self.sharded, self._rank = step.sharded, 0

    def enter(self, world: World, entry: Entry, load: Callable[[bool], Loaded | None]) -> tuple[str, list[str]] | None:
        """Hold this rank's rows of the furthest state that ranks have. Where none has one, or rows of it are lost, take
        those of the latest checkpoint; where there is none either, of a rank's model at the start."""
        nodes = world.all_gather_object(world.node_rank)
        plan = plan_replicas(self.step.config.strategy, nodes, can_divide=world.topology == "mesh")
        if world.rank == 0:
            _log.info("%d ranks hold %d copies of the model, each over %d", len(nodes), len(plan.replicas), plan.size)
        mine = Holding(
            is_fresh=entry.is_fresh,
            size=self.sharded.size,
            place=self.sharded.place,
            step=self.progress.step,
            awaits_commit=self.step.awaits_commit == self.progress.step,
            evaluated=self.progress.evaluated_step,
            has_start=self.sharded.is_whole or self.start is not None,
        )
        self.step.plan, self._rank = plan, world.rank
        holdings = [Holding(**item) for item in world.all_gather_object(asdict(mine))]
        sources = find_sources(holdings)
        if sources is None:
            loaded = load(True) if entry.has_state or entry.resumes else None
            if loaded is not None:
                self.restore(loaded.state)
                return loaded.folder, loaded.changes
            self._begin(world, find_start(holdings))
            return None
        if is_behind(mine, sources.step):
            self.step.update()
        progress = read_progress(world.all_gather_object(asdict(self.progress))[sources.reader])
        is_best = progress.best_step != self.progress.best_step and progress.best_step == progress.step
        if is_best and not entry.is_fresh:
            self.keep_best()  # the others have just found these weights to be the best
        self.progress = progress
        # Who has missed an evaluation has missed what a scheduler learned of it, too.
        if len({item.evaluated for item in holdings}) > 1 or any(
            item.is_fresh or (item.size, item.place) != (plan.size, plan.place_of(rank))
            for rank, item in enumerate(holdings)
        ):
            self._move_rows(world, sources)
        return None

    def writes(self, world: World) -> bool:
        """Return whether this rank writes to checkpoints: those of the first replica do."""
        return world.rank in self.step.plan.replicas[0]

    def capture(self, best_is_saved: bool = True) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, see `trainer.checkpoint.files`. The tensors are the live ones."""
        kept = self.step.optimizer_rows()
        rows = self._rows(kept)
        if best_is_saved:
            rows.pop(BEST, None)
        names = set(self.sharded.shapes)
        return {
            "place": self.sharded.place,
            "size": self.sharded.size,
            "rows": rows,
            "aliases": self.sharded.aliases,
            "scalars": kept.scalars,
            "options": kept.options,
            "buffers": self._buffers(),
            "best_buffers": {name: value for name, value in (self.best or {}).items() if name not in names},
            "order": list(self.module.state_dict()),
            "grown": self.grown(),
            "progress": asdict(self.progress),
        }

    def keep_best(self) -> None:
        """Keep copies of the present rows and buffers as the best so far."""
        kept = self.sharded.rows | self._buffers()
        self.best = {name: tensor.detach().cpu().clone() for name, tensor in kept.items()}

    @contextmanager
    def whole(self, world: World) -> Iterator[None]:
        """Let the model be a whole, with all its weights, on every rank. Afterwards each rank holds its rows as before.
        A collective."""
        try:
            undo = self._hold_whole(world, WEIGHTS)
            try:
                yield
            finally:
                undo()
        finally:
            self.step.adopt(world)

    def hold_best(self, world: World) -> Callable[[], None]:
        """Let the model be a whole of the best weights on every rank, of the last where there are no best ones. Return
        what lets each rank hold its rows again; passes need `ShardedStep.adopt` then. A collective."""
        return self._hold_whole(world, WEIGHTS if self.best is None else BEST)

    def _begin(self, world: World, start: Sources | None) -> None:
        """Hold this rank's rows of the model as it was before the first step. A collective."""
        if start is None:
            raise RuntimeError("rows of the model are lost with their ranks, and there is no checkpoint to go back to")
        if world.rank == start.reader and not self.sharded.is_whole:
            assert self.start is not None
            self.sharded.make_whole(self.start)
        if self.sharded.is_whole and self.start is None:
            self.start = {name: rows.cpu().clone() for name, rows in self.sharded.rows.items()}
        self._move_rows(world, start)

    def _forms(self) -> dict[str, Any]:
        sharded, names = self.sharded, {name: name for name in self.sharded.shapes} | self.sharded.aliases
        like = {name: value for name, value in self.module.state_dict().items() if name not in names}
        return like | {
            name: torch.empty(sharded.shapes[first], dtype=sharded.dtype, device="meta")
            for name, first in names.items()
        }

    def _take(self, state: dict[str, Any]) -> None:
        optimizer = state["step"]["optimizer"]
        kept = OptimizerRows({}, {}, optimizer)
        for place, (name, shape) in enumerate(self.sharded.shapes.items()):
            for kind, value in optimizer["state"].get(place, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                    kept.rows.setdefault(kind, {})[name] = self._cut(name, value)
                else:
                    kept.scalars.setdefault(name, {})[kind] = value
        take_buffers(self.module, state["model"])
        self._hold({name: self._cut(name, state["model"][name]) for name in self.sharded.shapes})
        self.step.hold_rows(kept)
        self.best = self.start = None
        if best := state.get("best"):
            self.best = {name: self._cut(name, best[name]).cpu() for name in self.sharded.shapes}
            self.best |= {name: best[name].cpu().clone() for name in self._buffers()}

    def _rows(self, kept: OptimizerRows) -> dict[str, dict[str, Tensor]]:
        """Return the rows of this rank, by kind and by name; kinds that there are not yet are left out."""
        found = {WEIGHTS: self.sharded.rows, **kept.rows}
        if self.best is not None:
            found[BEST] = {name: self.best[name] for name in self.sharded.shapes}
        return found

    def _buffers(self) -> dict[str, Tensor]:
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.module.state_dict().items() if name not in parameters}

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this rank's rows, by the present plan, of a whole parameter or of a tensor of its shape."""
        return self.sharded.take_rows(name, whole, self.step.plan.place_of(self._rank), self.step.plan.size)

    def _hold(self, rows: Mapping[str, Tensor]) -> None:
        self.sharded.shard(self.step.plan.place_of(self._rank), self.step.plan.size, rows)

    def _move_rows(self, world: World, sources: Sources) -> None:
        """Hold this rank's rows by the present plan, taken from the ranks that have them. A collective."""
        own = self.step.optimizer_rows()
        mine = self._rows(own)
        known: list[Any] = world.all_gather_object([[kind, list(rows)] for kind, rows in mine.items()])
        kept: dict[str, dict[str, Tensor]] = {}
        for kind, names in known[sources.reader]:
            kept[kind] = {}
            for name in names:
                taken = self._cut(name, self._pass_whole(world, name, mine.get(kind, {}).get(name), sources))
                kept[kind][name] = taken.cpu() if kind == BEST else taken
        of_this: dict[str, Any] = {"scalars": own.scalars, "options": own.options}
        of_reader = pass_state(world, sources.reader, range(world.world_size), lambda: of_this) or of_this
        share_module_state(self.module, world, sources.reader)
        self._hold(kept[WEIGHTS])
        of_optimizer = {kind: rows for kind, rows in kept.items() if kind not in (WEIGHTS, BEST)}
        self.step.hold_rows(OptimizerRows(of_optimizer, of_reader["scalars"], of_reader["options"]))
        before, self.best = self.best, None
        if BEST in kept:
            buffers = {name: value.cpu().clone() for name, value in self._buffers().items()}
            if before is not None:
                buffers |= {name: before[name] for name in buffers if name in before}
            passed = pass_state(world, sources.reader, range(world.world_size), lambda: buffers)
            self.best = kept[BEST] | (buffers if passed is None else passed)

    def _pass_whole(self, world: World, name: str, mine: Tensor | None, sources: Sources) -> Tensor:
        """Return a whole parameter, or another tensor of its shape, on the CPU, from the ranks that hold its rows. A
        collective."""
        shape = self.sharded.shapes[name]
        whole = torch.empty(shape, dtype=self.sharded.dtype)
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

    def _hold_whole(self, world: World, kind: str) -> Callable[[], None]:
        """Make the model a whole on every rank, of weights of this kind. Return what lets each rank hold its rows
        again. A collective."""
        self.step.sync.unwrap()
        rows, kept = self.sharded.rows, self.step.optimizer_rows()
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}

        def undo() -> None:
            self._hold(rows)
            self.step.hold_rows(kept)
            take_buffers(self.module, buffers)

        try:
            replica, mine = self.step.plan.replicas[0], self._rows(kept)[kind]
            sources = Sources(0, self.sharded.size, replica, replica[0])
            self.sharded.make_whole(
                {name: self._pass_whole(world, name, mine[name], sources) for name in self.sharded.shapes}
            )
            if kind == BEST:
                assert self.best is not None
                take_buffers(self.module, self.best)
        except BaseException:
            undo()
            raise
        return undo

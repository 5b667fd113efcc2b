"""The state of a training: the contents of a checkpoint, which newcomers also get from a survivor, and the progress."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.manager import check_fits
from trainer.comm.world import World
from trainer.data.coverage import EpochCoverage, add
from trainer.engine.sharded_state import capture_part, keep_best_rows, take_whole_state
from trainer.engine.state_passing import pass_state
from trainer.engine.step import TrainingStep


@dataclass(slots=True)
class Progress:
    """The progress of a training, saved in every checkpoint. Everything else follows from the configuration."""

    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    evaluated_step: int = 0
    """The last step after which the validation split was evaluated."""
    evaluations_without_improvement: int = 0
    early_stopped: bool = False
    consumed: list[EpochCoverage] = field(default_factory=list)
    """The samples used in each epoch, the newest last; see `trainer.data.coverage`."""

    def commit(self, epoch: int, samples: int, digest: int) -> None:
        """Count a step as done, in which all ranks together used this many samples, with this digest."""
        self.step += 1
        self.samples_seen += samples
        if not self.consumed or self.consumed[-1].epoch != epoch:
            self.consumed.append(EpochCoverage(epoch))
        last = self.consumed[-1]
        last.samples += samples
        last.digest = add(last.digest, digest)


def read_progress(saved: dict[str, Any]) -> Progress:
    """Return the progress that was saved as plain values."""
    return Progress(**{**saved, "consumed": [EpochCoverage(**item) for item in saved["consumed"]]})


@dataclass(slots=True)
class TrainingState:
    """Everything that changes during training."""

    module: nn.Module
    step: TrainingStep
    progress: Progress = field(default_factory=Progress)
    best: dict[str, Tensor] | None = None
    """The best weights so far, on the CPU of every rank, so that the end of a training does not depend on storage."""
    start: dict[str, Tensor] | None = None
    """Of a sharded model that has no checkpoint yet: all parameters before the first step, on the CPU."""

    def capture(self, best_is_saved: bool = True) -> dict[str, Any]:
        """Return the contents of a checkpoint, with the best weights unless another checkpoint has them. The tensors
        are the live ones, not copies. Of a sharded model it is this rank's part (`trainer.checkpoint.parts`)."""
        if self.step.sharded is not None:
            return capture_part(self, best_is_saved)
        state = {"model": self.module.state_dict(), "step": self.step.state_dict(), "progress": asdict(self.progress)}
        if self.best is not None and not best_is_saved:
            state["best"] = self.best
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state that `capture` returned. Raise `trainer.checkpoint.manager.CheckpointError`, before
        anything is changed, if it does not fit."""
        check_fits(state["model"], self.module.state_dict())
        progress = read_progress(state["progress"])
        self.module.load_state_dict(state["model"])
        self.step.load_state_dict(state["step"])
        self.progress = progress
        self.best = state.get("best")
        if self.best is None and self.progress.best_step == self.progress.step > 0:
            self.keep_best()

    def restore_rows(self, state: dict[str, Any], place: int, size: int) -> None:
        """Take over the rows of this place of a whole state, as `restore`."""
        sharded = self.step.sharded
        assert sharded is not None
        known = dict.fromkeys([*sharded.shapes, *sharded.aliases])
        like = {name: value for name, value in self.module.state_dict().items() if name not in known}
        shapes = {name: sharded.shapes[sharded.aliases.get(name, name)] for name in known}
        like |= {name: torch.empty(shape, dtype=sharded.dtype, device="meta") for name, shape in shapes.items()}
        check_fits(state["model"], like)
        progress = read_progress(state["progress"])
        take_whole_state(self, state, place, size)
        self.progress, self.start = progress, None
        if self.best is None and self.progress.best_step == self.progress.step > 0:
            self.keep_best()

    def keep_best(self) -> None:
        """Keep the present weights as the best so far; of a sharded model, this rank's rows."""
        if self.step.sharded is not None:
            self.best = keep_best_rows(self)
            return
        self.best = {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}

    def share(self, world: World, source: int, takers: Collection[int] | None = None) -> None:
        """Give the ranks ``takers`` (None: all) the state of rank ``source``; a collective of all ranks."""
        takers = range(world.world_size) if takers is None else takers
        state = pass_state(world, source, takers, lambda: self.capture(best_is_saved=False))
        if state is not None:
            self.restore(state)

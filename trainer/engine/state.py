"""The state of a training: the contents of a checkpoint, which newcomers also get from a survivor, and the progress."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.manager import check_fits
from trainer.comm.world import World
from trainer.data.coverage import EpochCoverage, add
from trainer.differences import describe_difference, list_differences
from trainer.engine.module_state import (
    buffer_forms,
    copy_state_dict,
    form_of,
    is_extra,
    load_state_dict,
    require_plain_state,
)
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
    measure: dict[str, str] = field(default_factory=dict)
    """What the scores depend on (`trainer.engine.identity.digest_measure`)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the training (`trainer.config.DistributedTrainingConfig`)."""

    def commit(self, epoch: int, samples: int, digest: int) -> None:
        """Count a step as done, in which all ranks together used this many samples, with this digest."""
        self.step += 1
        self.samples_seen += samples
        if not self.consumed or self.consumed[-1].epoch != epoch:
            self.consumed.append(EpochCoverage(epoch))
        last = self.consumed[-1]
        last.samples += samples
        last.digest = add(last.digest, digest)

    def note_evaluation(self, loss: float, patience: int | None) -> bool:
        """Count an evaluation after the steps so far, and return whether it is the best. Without a better one in
        ``patience`` evaluations the training stops early."""
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.evaluations_without_improvement = loss, self.step, 0
            return True
        self.evaluations_without_improvement += 1
        self.early_stopped = patience is not None and self.evaluations_without_improvement >= patience
        return False

    def position(self, count: int) -> tuple[int, int]:
        """Return the epoch and the position in its order at which the next step begins. ``count``: the samples of the
        training split. It follows from the samples used, not from the steps, whose batches may have had other sizes."""
        if not self.consumed:
            return 0, 0
        last = self.consumed[-1]
        return (last.epoch, last.samples) if last.samples < count else (last.epoch + 1, 0)

    def epochs(self, count: int) -> float:
        """Return the epochs that are done, with the part of the present one."""
        epoch, offset = self.position(count)
        return epoch + offset / count


def read_progress(saved: dict[str, Any]) -> Progress:
    """Return the progress that was saved as plain values."""
    return Progress(**{**saved, "consumed": [EpochCoverage(**item) for item in saved["consumed"]]})


def describe_changes(state: dict[str, Any], now: Progress) -> list[str]:
    """Return in words what is otherwise now than when a state was saved: settings, then what scores depend on. Older
    versions saved neither, or settings that are none now. Pure."""
    saved = state["progress"]
    before = {name: value for name, value in saved.get("settings", {}).items() if name in now.settings}
    settings = list_differences(before, now.settings) if before else {}
    changed = _changes_of_measure(saved, now)
    told = [describe_difference(f"training.{name}", *values) for name, values in settings.items()]
    return told + ([f"{' and '.join(changed)} changed: the best score begins anew"] if changed else [])


def take_up(state: dict[str, Any], now: Progress) -> None:
    """Let a saved state have the present settings, and no best score where scores of before are not to be compared with
    those of now."""
    saved, patience = state["progress"], now.settings.get("early_stopping_patience")
    kept = ["settings", "measure"]
    if _changes_of_measure(saved, now):
        kept += ["best_loss", "best_step", "evaluated_step", "evaluations_without_improvement", "early_stopped"]
        state.pop("best", None)
    begun = Progress(settings=now.settings, measure=now.measure)
    state["progress"] = saved | {name: getattr(begun, name) for name in kept}
    waited = state["progress"]["evaluations_without_improvement"]
    state["progress"]["early_stopped"] = patience is not None and waited >= patience


def _changes_of_measure(saved: dict[str, Any], now: Progress) -> list[str]:
    before = saved.get("measure", {})
    return [name for name, value in now.measure.items() if before.get(name, value) != value]


@dataclass(slots=True)
class TrainingState:
    """Everything that changes during training."""

    module: nn.Module
    step: TrainingStep
    progress: Progress = field(default_factory=Progress)
    best: dict[str, Any] | None = None
    """The best weights so far, on the CPU of every rank, so that the end of a training does not depend on storage."""
    start: dict[str, Tensor] | None = None
    """Of a sharded model that has no checkpoint yet: all parameters before the first step, on the CPU."""
    first_forms: dict[str, list[str]] = field(init=False)
    """The shapes and types of the buffers of the model as it was made: some grow with what they have seen."""

    def __post_init__(self) -> None:
        self.first_forms = buffer_forms(self.module)

    def capture(self, best_is_saved: bool = True) -> dict[str, Any]:
        """Return the contents of a checkpoint, with the best weights unless another checkpoint has them. The tensors
        are the live ones, not copies. Of a sharded model it is this rank's part (`trainer.checkpoint.parts`)."""
        if self.step.sharded is not None:
            return capture_part(self, best_is_saved)
        whole = self.module.state_dict()
        require_plain_state(whole)
        state = {"model": whole, "step": self.step.state_dict(), "progress": asdict(self.progress)}
        if grown := self.grown():
            state["grown"] = grown
        if self.best is not None and not best_is_saved:
            state["best"] = self.best
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state that `capture` returned. Raise `trainer.checkpoint.manager.CheckpointError`, before
        anything is changed, if it does not fit."""
        check_fits(state["model"], self._like(state, self.module.state_dict()))
        progress = read_progress(state["progress"])
        load_state_dict(self.module, state["model"])
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
        check_fits(state["model"], self._like(state, like))
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
        self.best = copy_state_dict(self.module)

    def grown(self) -> dict[str, list[str] | None]:
        """Return the forms that buffers had when the model was made, of those that have another now; None for one that
        was not set then."""
        now, first = buffer_forms(self.module), self.first_forms
        return {name: first.get(name) for name, form in now.items() if first.get(name) != form}

    def _like(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the form that a state dict must have: of buffers that had grown that of the saved ones, if they were
        made as they are now, and of extra state any."""
        saved, mine = state["model"], self.grown()
        grown = {name for name, form in state.get("grown", {}).items() if self.first_forms.get(name) == form}
        grown |= {name for name, form in mine.items() if name in saved and form_of(saved[name]) == form}
        like = {
            name: saved[name] if name in saved and (name in grown or is_extra(name)) else value
            for name, value in own.items()
            if name in saved or mine.get(name, ()) is not None
        }
        return like | {name: saved[name] for name in grown if name in saved}

    def share(self, world: World, source: int, takers: Collection[int] | None = None) -> None:
        """Give the ranks ``takers`` (None: all) the state of rank ``source``; a collective of all ranks."""
        takers = range(world.world_size) if takers is None else takers
        state = pass_state(world, source, takers, lambda: self.capture(best_is_saved=False))
        if state is not None:
            self.restore(state)

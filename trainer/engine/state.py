"""The state of a training: the contents of a checkpoint, which newcomers also get from a survivor, and the progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from trainer.checkpoint.manager import CheckpointError, check_fits
from trainer.comm.state_passing import pass_state
from trainer.comm.world import World
from trainer.config import ConfigError
from trainer.data.coverage import SAMPLES, STREAM, EpochCoverage, StreamPlace, add
from trainer.differences import describe_difference, list_differences
from trainer.engine.identity import MONITORED
from trainer.engine.module_state import (
    buffer_forms,
    copy_state_dict,
    form_of,
    is_extra,
    load_state_dict,
    require_plain_state,
)
from trainer.engine.step import TrainingStep
from trainer.runtime.nested import find_odd_part


@dataclass(slots=True)
class Progress:
    """The progress of a training, saved in every checkpoint. Everything else follows from the configuration."""

    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    best_loss: float = math.inf
    """The validation loss of the best weights."""
    best_score: float | None = None
    """The figure by which they were chosen (``training.monitor``); None while there are none."""
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

    def commit(
        self, epoch: int, samples: int, digest: int, kind: str = SAMPLES, place: StreamPlace | None = None
    ) -> None:
        """Count a step as done, in which all ranks together used this many samples, with this digest. ``kind``: what it
        is of; ``place``: where a stream is now."""
        self.step += 1
        self.samples_seen += samples
        if not self.consumed or self.consumed[-1].epoch != epoch:
            if len(self.consumed) > 1:  # what it drew of a stream is what the first pass drew
                self.consumed[-1].drawn = self.consumed[-1].ended = None
            self.consumed.append(EpochCoverage(epoch, kind=kind))
        last = self.consumed[-1]
        if place is not None:
            last.drawn, last.ended = place.drawn, place.ended
        last.samples += samples
        last.digest = add(last.digest, digest)

    def note_evaluation(self, loss: float, score: float, mode: str, patience: int | None) -> bool:
        """Count an evaluation after the steps so far, and return whether it is the best by its score. Without a better
        one in ``patience`` evaluations the training stops early."""
        best = self.best_score
        if math.isfinite(score) and (best is None or (score > best if mode == "max" else score < best)):
            self.best_loss, self.best_score, self.best_step = loss, score, self.step
            self.evaluations_without_improvement = 0
            return True
        self.evaluations_without_improvement += 1
        waited = self.evaluations_without_improvement
        self.early_stopped = self.early_stopped or (patience is not None and waited >= patience)
        return False

    def position(self, count: int) -> tuple[int, int]:
        """Return the epoch and the position in its order at which the next step begins. ``count``: the samples of the
        training split. It follows from the samples used, not from the steps, whose batches may have had other sizes."""
        if not self.consumed:
            return 0, 0
        last = self.consumed[-1]
        is_whole = last.is_whole_pass if last.kind == STREAM else last.samples >= count
        return (last.epoch + 1, 0) if is_whole else (last.epoch, last.samples)

    def epochs(self, count: int) -> float:
        """Return the epochs that are done, with the part of the present one; of a stream, whose length nobody knows,
        the whole ones."""
        epoch, offset = self.position(count)
        return epoch + (0 if self.consumed and self.consumed[-1].kind == STREAM else offset / count)


def read_progress(saved: dict[str, Any]) -> Progress:
    """Return the progress that was saved as plain values."""
    # Older versions chose by the loss.
    older = {} if "best_score" in saved or not saved["best_step"] else {"best_score": saved["best_loss"]}
    return Progress(**{**older, **saved, "consumed": [EpochCoverage(**item) for item in saved["consumed"]]})


def describe_changes(state: dict[str, Any], now: Progress) -> list[str]:
    """Return in words what is otherwise now than when a state was saved: settings, then what scores depend on. Older
    versions saved neither, or settings that are none now. Pure."""
    saved = state["progress"]
    before = {name: value for name, value in saved.get("settings", {}).items() if name in now.settings}
    settings = list_differences(before, {name: now.settings[name] for name in before}) if before else {}
    changed = _changes_of_measure(saved, now)
    told = [describe_difference(f"training.{name}", *values) for name, values in settings.items()]
    return told + ([f"{' and '.join(changed)} changed: the best score begins anew"] if changed else [])


def take_up(state: dict[str, Any], now: Progress) -> None:
    """Let a saved state have the present settings, and no best score where scores of before are not to be compared with
    those of now."""
    saved, patience = state["progress"], now.settings.get("early_stopping_patience")
    kept = ["settings", "measure"]
    if _changes_of_measure(saved, now):
        kept += [
            "best_loss",
            "best_score",
            "best_step",
            "evaluated_step",
            "evaluations_without_improvement",
            "early_stopped",
        ]
        state.pop("best", None)
    begun = Progress(settings=now.settings, measure=now.measure)
    state["progress"] = saved | {name: getattr(begun, name) for name in kept}
    waited = state["progress"]["evaluations_without_improvement"]
    state["progress"]["early_stopped"] = patience is not None and waited >= patience


def _changes_of_measure(saved: dict[str, Any], now: Progress) -> list[str]:
    before = {MONITORED: "loss, min", **saved.get("measure", {})}
    return [name for name, value in now.measure.items() if before.get(name, value) != value]


def _plain_state(name: str, owner: Any) -> Any:
    """Return the state of something of the caller's. Raise `ConfigError` for one that a checkpoint could not keep."""
    state = owner.state_dict()
    if (odd := find_odd_part(state)) is not None:
        raise ConfigError(
            f"{name}.state_dict() has a {type(odd).__name__}, and a checkpoint holds tensors and plain values only"
        )
    return state


class Loaded(NamedTuple):
    """A checkpoint that was read, with the present settings."""

    state: dict[str, Any]
    folder: str
    changes: list[str]
    """What is otherwise now than when it was saved."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How this rank comes into a world, and where the state of the training is to be had there."""

    has_state: bool = False
    """Whether any rank has one."""
    is_fresh: bool = True
    """Whether this rank has none that counts."""
    source: int | None = 0
    """The rank that gives its state to others where each holds all of it; None: all have it."""
    takers: Collection[int] | None = None
    """The ranks that get it; None: all."""
    resumes: bool = False
    """Whether the latest checkpoint is taken where no rank has a state."""


class TrainingState:
    """Everything that changes during training, where each rank holds all of it."""

    best: dict[str, Any] | None = None
    """The best weights so far, on the CPU of every rank, so that the end of a training does not depend on storage."""

    start: dict[str, Any] | None = None
    """Where ranks hold rows and there is no checkpoint: all parameters before the first step, on the CPU. When ranks
    are lost before there is one, they are given out again."""

    def __init__(self, step: TrainingStep) -> None:
        self.step, self.module, self.progress = step, step.module, Progress()
        self.attached: Mapping[str, Any] = {}
        """What of the caller's has a state of its own, by name."""
        self.first_forms = buffer_forms(self.module)
        """The shapes and types of the buffers of the model as it was made: some grow with what they have seen."""

    def enter(self, world: World, entry: Entry, load: Callable[[bool], Loaded | None]) -> tuple[str, list[str]] | None:
        """Have the furthest state of the ranks of a world, before the step works in it. Return the folder and the
        changes of the checkpoint that it was taken from; None where it was not. A collective.

        ``load`` returns the latest checkpoint, None where there is none: on all ranks together if it is called with
        True, otherwise for this rank alone."""
        if entry.has_state:
            if entry.source is not None:
                self.share(world, entry.source, entry.takers)
            return None
        loaded = load(False) if entry.resumes and world.rank == 0 else None
        if loaded is not None:
            self.restore(loaded.state)
        self.share(world, 0)
        if not entry.resumes:
            return None
        found: tuple[str, list[str]] | None = world.all_gather_object(loaded and (loaded.folder, loaded.changes))[0]
        return found

    def writes(self, world: World) -> bool:
        """Return whether this rank writes to checkpoints."""
        return world.rank == 0

    def capture(self, best_is_saved: bool = True) -> dict[str, Any]:
        """Return the contents of a checkpoint, with the best weights unless another checkpoint has them. The tensors
        are the live ones, not copies. A collective where ranks hold parts."""
        self.step.take_whole()
        whole = self.module.state_dict()
        require_plain_state(whole)
        state = {"model": whole, "step": self.step.state_dict(), "progress": asdict(self.progress)}
        if grown := self.grown():
            state["grown"] = grown
        if self.best is not None and not best_is_saved:
            state["best"] = self.best
        if self.attached:
            state["attached"] = {name: _plain_state(name, each) for name, each in self.attached.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state that `capture` of an undivided training returned. Raise
        `trainer.checkpoint.manager.CheckpointError`, before anything is changed, if it does not fit."""
        check_fits(state["model"], self._like(state, self._forms()))
        if why := self.step.scheduled.explain_misfit(state["step"]["optimizer"]):
            raise CheckpointError(f"the checkpoint cannot be continued: {why}")
        progress = read_progress(state["progress"])
        self._take(state)
        for name, each in self.attached.items():
            if name in state.get("attached", {}):
                each.load_state_dict(state["attached"][name])
        self.progress = progress
        if self.best is None and self.progress.best_step == self.progress.step > 0:
            self.keep_best()

    def keep_best(self) -> None:
        """Keep the present weights as the best so far."""
        self.best = copy_state_dict(self.module)

    @contextmanager
    def whole(self, world: World) -> Iterator[None]:
        """Let the model be a whole, with its present weights, on every rank. A collective where ranks hold parts."""
        self.step.take_whole()
        yield

    def hold_best(self, world: World) -> Callable[[], None]:
        """Let the model be a whole of the best weights on every rank, of the last where there are no best ones. Return
        what goes back to the state before. A collective where ranks hold parts."""
        self.step.take_whole()
        if self.best is None or self.progress.best_step == self.progress.step:
            return lambda: None  # no validation loss was ever finite, or the last weights are the best
        last = copy_state_dict(self.module)
        load_state_dict(self.module, self.best)
        return lambda: load_state_dict(self.module, last)

    def grown(self) -> dict[str, list[str] | None]:
        """Return the forms that buffers had when the model was made, of those that have another now; None for one that
        was not set then."""
        now, first = buffer_forms(self.module), self.first_forms
        return {name: first.get(name) for name, form in now.items() if first.get(name) != form}

    def share(self, world: World, source: int, takers: Collection[int] | None = None) -> None:
        """Give the ranks ``takers`` (None: all) the state of rank ``source``; a collective of all ranks."""
        takers = range(world.world_size) if takers is None else takers
        state = pass_state(world, source, takers, lambda: self.capture(best_is_saved=False))
        if state is not None:
            self.restore(state)

    def _forms(self) -> dict[str, Any]:
        """Return a state dict of the forms that the model has."""
        return self.module.state_dict()

    def _take(self, state: dict[str, Any]) -> None:
        """Hold the weights, the moments and the best weights of a state."""
        load_state_dict(self.module, state["model"])
        self.step.load_state_dict(state["step"])
        self.best = state.get("best")

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

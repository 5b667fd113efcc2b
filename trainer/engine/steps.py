"""A step that is due, what ranks tell each other when they commit it, and how it ended.

A training is a generator of steps that are due (`Steps`): whoever drives it carries them out, at once (`carry_out`) or
in the body of a loop of the caller's own (`trainer.loop`), and sends their results, or throws what they raised.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trainer.data.batches import Batch

_T = TypeVar("_T")


class NonFiniteError(RuntimeError):
    """The loss or its gradient is not a finite number. The message names the step and the remedies."""


def explain_non_finite(step: int, learning_rate: float, norm: float, data: str = "") -> NonFiniteError:
    """Return the error of a step (0-based) whose loss or gradient is not finite. ``data``: what is not finite in its
    samples."""
    remedies = (
        "lower training.learning_rate, raise training.warmup_steps, set training.clip_norm, or look for extreme values "
        "in the data"
    )
    if data:
        remedies = f"{data}; where that is meant, {remedies}"
    return NonFiniteError(
        f"the loss or its gradient is not finite at step {step + 1} (learning rate {learning_rate:.3g}, "
        f"gradient norm {norm:.3g}): {remedies}; the last checkpoint is untouched"
    )


@dataclass(frozen=True, slots=True)
class StepFlags:
    """Counts of ranks in each situation, which ranks exchange in one small all-reduce when they commit a step."""

    leaving: int = 0
    """Ranks that were asked to end (SIGTERM)."""
    regroup: int = 0
    """Ranks that want another generation after this step."""
    cut_off: int = 0
    """Ranks that do not reach all others."""
    budget: int = 0
    """Ranks that see the budget spent; only rank 0 looks."""
    ending: int = 0
    """Ranks whose loop has asked for the training to end after this step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. ``loss_sum`` and ``weight`` are this rank's parts: the sums of its samples' losses, and of
    what its samples weigh in the mean (`trainer.model.task`)."""

    loss_sum: float
    weight: float
    grad_norm: float
    flags: StepFlags
    digest: int
    """The digest of all samples of the global batch, see `trainer.data.coverage`."""


@dataclass(frozen=True, slots=True)
class DueStep:
    """A step that is to be carried out on all ranks."""

    step: Callable[[Batch, int, float, StepFlags], StepResult]
    """What carries it out, a `trainer.engine.step.TrainingStep`."""
    batch: Batch
    number: int
    """From 0, over all epochs."""
    epoch: int
    learning_rate: float
    """That of the settings."""
    flags: StepFlags
    """What this rank tells the others with it."""


Steps = Generator[DueStep, StepResult, _T]
"""A training, which yields each step that is due, is sent its result, and returns a result of its own."""


def carry_out(steps: Steps[_T]) -> _T:
    """Carry out each step as it becomes due, and return what the training returns. What a step raises is thrown into
    the training, which goes on or raises it."""
    try:
        due = next(steps)
        while True:
            try:
                result = due.step(due.batch, due.number, due.learning_rate, due.flags)
            except BaseException as error:
                due = steps.throw(error)
            else:
                due = steps.send(result)
    except StopIteration as end:
        found: _T = end.value
        return found


def count_step(batch: Batch, flags: StepFlags, broken: bool, without: list[int]) -> Tensor:
    """Return what ranks sum when they commit a step. ``without``: see `GradientSynchronizer.missing_flags`."""
    counted = (flags.leaving, flags.regroup, flags.cut_off, flags.budget, flags.ending)
    counts = array("q", (broken, *counted, batch.local_samples, batch.digest, *without))
    return torch.frombuffer(counts, dtype=torch.int64)  # torch.tensor takes three times as long

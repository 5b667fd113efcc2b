"""Where a training was best on its validation split, and whether it overfits since. Pure.

One function decides for the live page and the saved page, so that they never differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

OVERFIT_SHARE = 0.10
"""The part of what the validation loss had gained by which it must have risen again for a training to overfit."""
LOOKS = 2
"""Evaluations since the best one from which a rise is believed; their mean counts."""


class LearningState(StrEnum):
    """What the validation loss does."""

    UNKNOWN = "unknown"
    """Fewer than two evaluations."""
    IMPROVING = "improving"
    """The latest evaluation is the best."""
    STALLED = "stalled"
    """It has not become better since the best one, and not clearly worse either."""
    OVERFITTING = "overfitting"
    """It has clearly risen since the best one, while the training loss has fallen."""
    WORSENING = "worsening"
    """It has clearly risen, and so has the training loss: the steps are too large, or the data has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One look at the validation split."""

    step: int
    loss: float
    epoch: int = 0
    """Counted from 1 as people do; 0: not known."""
    training_loss: float | None = None
    """The mean of the training loss since the evaluation before; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """The verdict on a curve of validation losses."""

    state: LearningState
    best: Evaluation
    since: int
    """The number of evaluations after the best one."""
    words: str
    """One or two sentences for people."""


def judge_learning(evaluations: Sequence[Evaluation]) -> Learning | None:
    """Return the verdict on evaluations in order of steps; None where there is none."""
    known = [item for item in evaluations if math.isfinite(item.loss)]
    if not known:
        return None
    best = min(known, key=lambda item: item.loss)
    later = known[known.index(best) + 1 :]
    state = _state(known[0], best, later) if len(known) > 1 else LearningState.UNKNOWN
    return Learning(state=state, best=best, since=len(later), words=_words(state, best, later))


def _state(first: Evaluation, best: Evaluation, later: Sequence[Evaluation]) -> LearningState:
    if not later:
        return LearningState.IMPROVING
    limit = OVERFIT_SHARE * (first.loss - best.loss)
    rise = sum(item.loss for item in later[-LOOKS:]) / len(later[-LOOKS:]) - best.loss
    if len(later) < LOOKS or not rise > limit:
        return LearningState.STALLED
    then, now = best.training_loss, later[-1].training_loss
    return LearningState.WORSENING if then is not None and now is not None and now > then else LearningState.OVERFITTING


def _words(state: LearningState, best: Evaluation, later: Sequence[Evaluation]) -> str:
    where = f"step {best.step:,}" + (f", epoch {best.epoch}" if best.epoch else "")
    at = f"The validation loss is lowest at {where}: {best.loss:.4f}."
    if state in (LearningState.UNKNOWN, LearningState.IMPROVING):
        return at if state is LearningState.UNKNOWN else f"{at} It still falls."
    looks = "the evaluation" if len(later) == 1 else f"the {len(later)} evaluations"
    rise = f"{later[-1].loss - best.loss:.4f}"
    if state is LearningState.STALLED:
        return f"{at} It has not been lower in {looks} since; the latest is {rise} above it."
    kept = "The model is taken from the best step, so later ones only cost time."
    if state is LearningState.WORSENING:
        return f"{at} It has risen by {rise} since, and the training loss has risen as well: lower the learning rate."
    return f"Overfitting: {at[0].lower()}{at[1:]} It has risen by {rise} since, while the training loss fell. {kept}"

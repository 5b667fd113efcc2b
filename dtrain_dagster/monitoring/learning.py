"""Where a training was best on its validation split, and whether it overfits since. Pure.

One function decides for the live page and the saved page, so that they never differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

OVERFIT_SHARE = 0.10
"""The part of what the validation loss had gained by which it must have risen again for a training to overfit."""
LOOKS = 2
"""Evaluations since the best one from which a rise is believed; their mean counts."""


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

    state: Literal["unknown", "improving", "stalled", "worsening", "overfitting"]
    """Unknown: of one evaluation. Worsening: the training loss has risen as well."""
    best: Evaluation
    words: str
    """One or two sentences for people."""


def judge_learning(evaluations: Sequence[Evaluation]) -> Learning | None:
    """Return the verdict on evaluations in order of steps; None where there is none."""
    known = [item for item in evaluations if math.isfinite(item.loss)]
    if not known:
        return None
    best = min(known, key=lambda item: item.loss)
    where = f"step {best.step:,}" + (f", epoch {best.epoch}" if best.epoch else "")
    at = f"The validation loss is lowest at {where}: {best.loss:.4f}."
    if len(known) == 1:
        return Learning(state="unknown", best=best, words=at)
    later = known[known.index(best) + 1 :]
    if not later:
        return Learning(state="improving", best=best, words=f"{at} It still falls.")
    limit = OVERFIT_SHARE * (known[0].loss - best.loss)
    rise = f"{later[-1].loss - best.loss:.4f}"
    if len(later) < LOOKS or not statistics.fmean(item.loss for item in later[-LOOKS:]) - best.loss > limit:
        looks = "the evaluation" if len(later) == 1 else f"the {len(later)} evaluations"
        words = f"{at} It has not been lower in {looks} since; the latest is {rise} above it."
        return Learning(state="stalled", best=best, words=words)
    then, now = best.training_loss, later[-1].training_loss
    if then is not None and now is not None and now > then:
        words = f"{at} It has risen by {rise} since, and the training loss has risen as well: lower the learning rate."
        return Learning(state="worsening", best=best, words=words)
    words = (
        f"Overfitting: {at[0].lower()}{at[1:]} It has risen by {rise} since, while the training loss fell. The model "
        "is taken from the best step, so later ones only cost time."
    )
    return Learning(state="overfitting", best=best, words=words)

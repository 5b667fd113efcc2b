"""Which trials end early: by successive halving (Optuna's pruners), by what they are worth, or none.

A decision is a function of the trial's own evaluations and of what is known of the others; what a pruner has to
remember of a trial are its marks. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dtrain_dagster.search.sampling import frozen_trial, quiet
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.trials import Trial, TrialState

REDUCTION = 3
"""Of this many trials, one goes on to the next rung of successive halving."""
RUNGS = frozenset(REDUCTION**rung for rung in range(20))
"""Evaluations at which there is something to decide."""
DIVERGED = "diverged: its score is not a finite number"


class Pruner(StrEnum):
    """What ends trials early."""

    WORTH = "worth"
    """What a trial would still cost exceeds what it can still gain: `dtrain_dagster.search.worth`."""
    ASHA = "asha"
    """Asynchronous successive halving: after 1, 3, 9, … evaluations the best third goes on."""
    HYPERBAND = "hyperband"
    """Several such halvings that begin at different rungs."""
    NONE = "none"
    """Every trial goes to its end."""


@dataclass(frozen=True, slots=True)
class Halved:
    """What successive halving says of a trial."""

    trial: Trial
    """With its marks."""
    reason: str = ""
    """Why it ends; "" where it goes on."""


def has_diverged(trial: Trial) -> bool:
    """Return whether the last evaluation is not a finite number."""
    return bool(trial.scores) and not math.isfinite(trial.scores[-1])


def halve(space: Space, pruner: Pruner, trial: Trial, others: Sequence[Trial], sign: float, seen: int = 0) -> Halved:
    """Return whether a trial goes on by successive halving, asked at each of its evaluations after the first ``seen``.
    ``others``: what is known of the other trials, with their marks."""
    import optuna

    quiet(optuna)
    for count in range(seen + 1, len(trial.scores) + 1):
        if count >= trial.of:
            break
        if count not in RUNGS:
            continue
        now = replace(trial, scores=trial.scores[:count], state=TrialState.RUNNING)
        study = optuna.create_study(study_name="search")
        by_number = {other.number: other for other in others}
        for number in range(trial.number):  # Optuna numbers trials by itself, and Hyperband sorts them by number
            other = by_number.get(number)
            study.add_trial(
                frozen_trial(space, other, sign)
                if other is not None
                else optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL)
            )
        study.add_trial(frozen_trial(space, now, sign))
        for number in sorted(set(by_number) - set(range(trial.number + 1))):
            study.add_trial(frozen_trial(space, by_number[number], sign))
        ends = _pruner(pruner, trial.of).prune(study, study.trials[trial.number])
        marks: dict[str, Any] = dict(study.trials[trial.number].system_attrs)
        trial = replace(trial, marks={name: value for name, value in marks.items() if "rung" in name})
        if ends:
            rungs = sum(name.startswith("completed_rung") for name in trial.marks)
            return Halved(trial, f"not among the best at rung {rungs}, after {count} evaluation(s)")
    return Halved(trial)


def marks_of(space: Space, pruner: Pruner, trial: Trial, sign: float) -> Mapping[str, Any]:
    """Return the marks of a trial that is over: its score at each rung that it has come to."""
    if pruner not in (Pruner.ASHA, Pruner.HYPERBAND):
        return {}
    return halve(space, pruner, replace(trial, marks={}), (), sign).trial.marks  # beside no other, it always goes on


def _pruner(pruner: Pruner, of: int) -> Any:
    import optuna

    if pruner is Pruner.ASHA:
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
    return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=of, reduction_factor=REDUCTION)

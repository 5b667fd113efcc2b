"""The values of a trial, drawn by Optuna's samplers. Pure: a function of the seed, the trial's number, and the trials
whose results count as known.

Each trial has a sampler of its own, seeded with the seed of the search and the number of the trial, on a study that
holds what counts as known and nothing else. So a trial can be drawn again, by whomever and whenever, to the same
values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dtrain_dagster.search.space import Space, Value
from dtrain_dagster.search.trials import Sampler, Trial

if TYPE_CHECKING:
    import optuna

RANDOM_FIRST = 5
"""Trials that the Gaussian process draws at random before it learns from results."""
MOST_DRAWS = 1000
"""Random draws of values that were tried before, after which none are left."""


def draw_values(
    space: Space,
    sampler: Sampler,
    seed: int,
    number: int,
    known: Sequence[Trial],
    running: Sequence[Trial],
    sign: float,
) -> dict[str, Value] | None:
    """Return the values of trial ``number``; None where all were tried. ``known``: trials whose results count;
    ``running``: of those that are not known yet. ``sign``: 1 where the metric is minimised, else -1."""
    import optuna

    own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    made: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=own_seed)
    if sampler is Sampler.gp:
        made = optuna.samplers.GPSampler(seed=own_seed, n_startup_trials=RANDOM_FIRST)
    drawn = ask_for_values(space, made, known, running, sign)
    tried = [trial.values for trial in (*known, *running)]
    if drawn not in tried:
        return drawn
    if len(tried) >= space.size:
        return None
    others = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=own_seed))
    for _ in range(MOST_DRAWS):
        drawn = others.ask(space.domains).params
        if drawn not in tried:
            return drawn
    return None


def ask_for_values(
    space: Space, sampler: optuna.samplers.BaseSampler, known: Sequence[Trial], running: Sequence[Trial], sign: float
) -> dict[str, Value]:
    """Return the values that one of Optuna's samplers draws beside these trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # what a search does is told by the search
    study = optuna.create_study(sampler=sampler)
    ended = [trial for trial in known if trial.state.is_final]
    for trial, goal in zip(ended, goals_of(ended, sign), strict=True):
        study.add_trial(as_optuna(space, trial, goal))
    for trial in running:
        study.add_trial(as_optuna(space, trial))
    return study.ask(space.domains).params


def goals_of(trials: Sequence[Trial], sign: float) -> list[float | None]:
    """Return what each trial counts with, lower being better: the logarithm of how far its best score lies above a
    floor, so that one bad trial does not make all others look alike. One that diverged or failed counts as the worst;
    None where there is no score at all.

    The floor is as far below the best score as that is below the middle one; zero where scores are positive and that
    would be below it, as of a loss that cannot be negative."""
    bests = [trial.best(sign) for trial in trials]
    scores = [
        math.inf if best is None or not math.isfinite(trial.scores[-1]) else sign * best
        for trial, best in zip(trials, bests, strict=True)
    ]
    finite = [score for score in scores if math.isfinite(score)]
    if not finite:
        return [None] * len(trials)
    best, worst = min(finite), max(finite)
    gap = (statistics.median(finite) - best) or (worst - best) or abs(best) or 1.0
    floor = max(0.0, best - gap) if best > 0 else best - gap
    return [math.log(min(score, worst) - floor) for score in scores]


def as_optuna(space: Space, trial: Trial, goal: float | None = None) -> optuna.trial.FrozenTrial:
    """Return a trial as Optuna has it: complete with this goal, or running."""
    import optuna

    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        state=states.RUNNING if goal is None else states.COMPLETE,
        value=goal,
        params=dict(trial.values),
        distributions=space.domains,
    )

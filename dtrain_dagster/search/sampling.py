"""The values of a trial, drawn by Optuna's samplers. Pure: a function of the seed, the trial's number, and the trials
whose results count as known.

Each trial has a sampler of its own, seeded with the seed of the search and the number of the trial, on a study that
holds what counts as known and nothing else. So a trial can be drawn again, by whomever and whenever, to the same
values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain_dagster.search.outlook import choose_values, outlook_of
from dtrain_dagster.search.space import Choices, Parameter, Range, Space, SpaceError, Value
from dtrain_dagster.search.trials import Trial, TrialState

if TYPE_CHECKING:
    import optuna

RANDOM_FIRST = 10
"""Trials that the tree-structured Parzen estimator draws at random before it learns from results."""
MOST_OF_GRID = 100_000


class Sampler(StrEnum):
    """How values are drawn."""

    TPE = "tpe"
    """Optuna's tree-structured Parzen estimator: more where trials were good."""
    RANDOM = "random"
    """Each evenly from its range."""
    MODEL = "model"
    """Where the best score is expected to improve the most, by a Gaussian process over what trials ended with, or are
    expected to have ended with where they were ended early: `dtrain_dagster.search.outlook`."""
    QMC = "qmc"
    """Evenly over the whole space (Sobol's sequence), with fewer gaps than at random."""
    GRID = "grid"
    """Every combination of a space of choices, whole numbers and ranges in steps, in an order of its own."""


def draw_values(
    space: Space,
    sampler: Sampler,
    seed: int,
    number: int,
    known: Sequence[Trial],
    running: Sequence[Trial],
    sign: float,
) -> dict[str, Value] | None:
    """Return the values of trial ``number``; None where a grid has no more. ``known``: trials whose results count;
    ``running``: of those that are not known yet, so that the same is not drawn again. ``sign``: 1 where the metric is
    minimised, else -1."""
    if sampler is Sampler.QMC:
        return _by_shares(space, _sobol(len(space.parameters), seed, number))
    if sampler is Sampler.GRID:
        combinations = grid_of(space)
        order = np.random.default_rng(seed).permutation(len(combinations))
        return combinations[order[number]] if number < len(combinations) else None
    if sampler is Sampler.MODEL:
        outlook = outlook_of(space, known, running, sign)
        if outlook is not None and outlook.surface is not None:
            return choose_values(outlook, [*known, *running], sign, np.random.default_rng([seed, number]))
    import optuna

    quiet(optuna)
    own_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    drawer: optuna.samplers.BaseSampler
    if sampler is Sampler.TPE:
        drawer = optuna.samplers.TPESampler(seed=own_seed, n_startup_trials=RANDOM_FIRST, constant_liar=True)
    else:
        drawer = optuna.samplers.RandomSampler(seed=own_seed)
    study = optuna.create_study(sampler=drawer)
    if sampler is Sampler.TPE:
        study.add_trials([frozen_trial(space, trial, sign) for trial in known])
        study.add_trials([frozen_trial(space, trial, sign, as_running=True) for trial in running])
    trial = study.ask()
    return space.draw(lambda item: _suggest(trial, item))


def grid_of(space: Space) -> list[dict[str, Value]]:
    """Return every combination of a space. Raise `SpaceError` for a range without steps, and for too many."""
    found: list[dict[str, Value]] = [{}]
    for parameter in space.parameters:
        values = _grid_values(parameter)
        longer: list[dict[str, Value]] = []
        for each in found:
            is_there = parameter.is_active(each)
            longer += [{**each, parameter.name: value} for value in values] if is_there else [each]
            if len(longer) > MOST_OF_GRID:
                raise SpaceError(f"a grid of more than {MOST_OF_GRID:,} trials; take another sampler, or larger steps")
        found = longer
    return found


def _grid_values(parameter: Parameter) -> Sequence[Value]:
    domain = parameter.domain
    if isinstance(domain, Choices):
        return domain.values
    step = domain.step or (1 if domain.whole else None)
    if step is None:
        raise SpaceError(
            f"{parameter.name} is a range without steps, so no grid can be made from it; give a step or choices"
        )
    count = int((domain.high - domain.low) / step + 1e-9) + 1
    return [round(domain.low + step * place) if domain.whole else domain.low + step * place for place in range(count)]


def frozen_trial(space: Space, trial: Trial, sign: float, as_running: bool = False) -> optuna.trial.FrozenTrial:
    """Return a trial as Optuna has it, with a score at which lower is better. ``as_running``: as one of which nothing
    but its values is known."""
    import optuna

    states = optuna.trial.TrialState
    best = trial.best(sign)
    state = states.RUNNING
    if not as_running and trial.state.is_final:
        state = states.FAIL if best is None else states.PRUNED
        if trial.state is TrialState.COMPLETE and best is not None:
            state = states.COMPLETE
    parameters = {item.name: item for item in space.parameters}
    shown = {} if as_running else dict(enumerate(trial.curve(sign).scores, start=1))
    return optuna.trial.create_trial(
        state=state,
        value=sign * best if state is states.COMPLETE and best is not None else None,
        params={name: stored_value(parameters[name], value) for name, value in trial.values.items()},
        distributions={name: distribution_of(parameters[name]) for name in trial.values},
        intermediate_values=shown,
        system_attrs={} if as_running else dict(trial.marks),
    )


def distribution_of(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    """Return the range of a parameter as Optuna has it."""
    import optuna

    domain = parameter.domain
    if isinstance(domain, Choices):
        return optuna.distributions.CategoricalDistribution([stored_value(parameter, value) for value in domain.values])
    if domain.whole:
        return optuna.distributions.IntDistribution(
            int(domain.low), int(domain.high), log=domain.log, step=int(domain.step or 1)
        )
    return optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)


def _suggest(trial: optuna.Trial, parameter: Parameter) -> Value:
    domain = parameter.domain
    if isinstance(domain, Choices):
        marks = [stored_value(parameter, value) for value in domain.values]
        return domain.values[marks.index(trial.suggest_categorical(parameter.name, marks))]
    if domain.whole:
        return trial.suggest_int(
            parameter.name, int(domain.low), int(domain.high), log=domain.log, step=int(domain.step or 1)
        )
    return trial.suggest_float(parameter.name, domain.low, domain.high, log=domain.log, step=domain.step)


def stored_value(parameter: Parameter, value: Value) -> Any:
    """Return a value as Optuna takes it: lists and maps as text."""
    if isinstance(parameter.domain, Range) or value is None or isinstance(value, bool | int | float | str):
        return value
    return json.dumps(value, sort_keys=True)


def _by_shares(space: Space, shares: np.ndarray) -> dict[str, Value]:
    by_name = {item.name: float(share) for item, share in zip(space.parameters, shares, strict=True)}
    return space.draw(lambda item: item.domain.at(by_name[item.name]))


def _sobol(dimensions: int, seed: int, number: int) -> np.ndarray:
    from scipy.stats import qmc

    points = qmc.Sobol(dimensions, scramble=True, seed=np.random.default_rng(seed))
    if number:
        points.fast_forward(number)
    return points.random(1)[0]


def quiet(optuna: Any) -> None:
    """Let Optuna print warnings only: what a search does is told by the search."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)

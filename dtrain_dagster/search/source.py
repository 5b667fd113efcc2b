"""The trials of a search as the jobs of a fleet: which comes next, whether it goes on, what it has come to.

`TrialSource` decides by its settings and by what the fleet tells it, and by nothing else. The fleet's record is its
memory: a trial's values are written with its job before anything is bought, and its scores are in its run directory.

Values are drawn by Optuna's samplers. Each trial has a sampler of its own, seeded with the seed of the search and the
number of the trial, on a study that holds what counts as known and nothing else. So a trial can be drawn again, by
whomever and whenever, to the same values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Standing
from dtrain_dagster.fleet.source import JobSource
from dtrain_dagster.search.space import Value, count_trials, values_of
from dtrain_dagster.search.trials import (
    LOSS,
    Sampler,
    SearchSettings,
    Trial,
    TrialState,
    best_trial,
    is_decision,
    why_ended,
)
from trainer.documents.events import EvaluationEvent
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import optuna

    from dtrain_dagster.search.space import Space

MakeJob = Callable[[int, Mapping[str, Any]], tuple[FleetJob, int]]
"""Makes the job of a trial from its number and its values, and tells how often it is evaluated in all. The job of
values that do not go together has a `problem`."""
Draw = Callable[[int, Sequence[Trial], Sequence[Trial]], Mapping[str, Any] | None]
"""Returns the values of a trial by its number, the trials whose results count, and others, of which only their values
do: how far they have come is chance; None where there are no more."""


class TrialSource(JobSource):
    """The trials of one search."""

    def __init__(self, space: Space, settings: SearchSettings, make_job: MakeJob, draw: Draw | None = None) -> None:
        """``draw``: what gives trials their values; None: the sampler of the settings."""
        self.space, self.settings, self._make_job = space, settings, make_job
        self._trials: list[Trial] = []
        self._numbers: dict[str, int] = {}
        self._draw = draw or (
            lambda number, known, running: draw_values(
                space, settings.sampler, settings.seed, number, known, running, settings.sign
            )
        )
        self._is_exhausted = False

    @property
    def trials(self) -> Sequence[Trial]:
        """Return all trials so far, in order."""
        return tuple(self._trials)

    @property
    def best(self) -> Trial | None:
        """Return the trial with the best score."""
        return best_trial(self._trials, self.settings.sign)

    def resume(self, given: Sequence[FleetJob]) -> Collection[str]:
        """Take over the trials of these jobs; how they went is told again."""
        for job in given:
            self._add(job)
        return list(self._numbers)

    def next_job(self) -> FleetJob | None:
        """Return the next trial's job; None while one has to wait, and when there is none left."""
        number = len(self._trials)
        known = self._known_to(number)
        must_wait = not all(trial.state.is_final for trial in known)
        if self._is_exhausted or must_wait or number >= self.settings.trials:
            return None
        values = self._draw(number, known, self._trials[len(known) :])
        if values is None:
            self._is_exhausted = True
            return None
        job, of = self._make_job(number, values)
        job = replace(job, facts={"values": dict(values), "of": of})
        self._add(job)
        return job

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> str:
        """Return why a trial ends after these evaluations; "" where it goes on."""
        trial = self._trials[self._numbers[job_id]]
        for count in range(len(trial.scores) + 1, len(evaluations) + 1):
            if trial.reason:
                break
            trial = self._with(trial, evaluations[:count])
            reason = why_ended(self.settings.pruner, trial, self._known_to(trial.number), self.settings.sign)
            trial = self._trials[trial.number] = replace(trial, reason=reason)
        return trial.reason

    def on_end(self, standing: Standing, evaluations: Sequence[EvaluationEvent]) -> None:
        """Take note that a trial is over."""
        has_succeeded = standing.state is FleetState.SUCCEEDED
        # That it ended before anyone looked is chance, which decides nothing: a seed gives the same trials.
        self.judge(standing.job_id, evaluations)
        trial = self._trials[self._numbers[standing.job_id]]
        if trial.reason:  # evaluations after the decision came by chance
            state, reason = TrialState.PRUNED, trial.reason
        else:
            trial = self._with(trial, evaluations)
            is_own = standing.state is FleetState.ENDED and is_decision(standing.reason)  # of who was killed since
            state = TrialState.COMPLETE if has_succeeded else TrialState.PRUNED if is_own else TrialState.FAILED
            reason = "" if has_succeeded else standing.reason
        self._trials[trial.number] = replace(
            trial, state=state, reason=reason, usd=standing.usd, node_seconds=standing.node_seconds
        )

    def _add(self, job: FleetJob) -> None:
        self._numbers[job.job_id] = number = len(self._trials)
        self._trials.append(Trial(number=number, values=job.facts["values"], of=job.facts["of"]))

    def _known_to(self, number: int) -> list[Trial]:
        """Return the trials whose results count for this one, and which have to end before it."""
        return self._trials[: max(0, number - self.settings.parallel + 1)]

    def _with(self, trial: Trial, evaluations: Sequence[EvaluationEvent]) -> Trial:
        """Return the trial with these evaluations."""
        return replace(
            trial,
            scores=tuple(score_of(item, self.settings.metric) for item in evaluations),
            times=tuple(item.time for item in evaluations),
            steps=tuple(item.step or 0 for item in evaluations),
        )


def score_of(evaluation: EvaluationEvent, metric: str) -> float:
    """Return the metric of an evaluation. A number that is missing counts as none: the trainer writes null for one that
    is not finite. Raise `ConfigError` for a metric that the task does not measure."""
    if metric == LOSS:
        value = evaluation.loss
    else:
        found = evaluation.metrics or {}
        if metric not in found:
            known = ", ".join([LOSS, *found])
            raise ConfigError(f"metric = {metric!r} is not measured by this task: choose one of {known}")
        value = found[metric]
    return float("nan") if value is None else float(value)


RANDOM_FIRST = 5
"""Trials that the Gaussian process draws at random before it learns from results."""
MOST_DRAWS = 1000
"""Random draws of values that were tried before, after which none are left; of finitely many, after which they are
looked for one after the other."""


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
    if len(tried) >= count_trials(space):
        return None
    others = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=own_seed))
    for _ in range(MOST_DRAWS):
        drawn = others.ask(dict(space)).params
        if drawn not in tried:
            return drawn
    if count_trials(space) == math.inf:
        return None
    every = (dict(zip(space, each, strict=True)) for each in itertools.product(*map(values_of, space.values())))
    return next(values for values in every if values not in tried)


def ask_for_values(
    space: Space, sampler: optuna.samplers.BaseSampler, known: Sequence[Trial], running: Sequence[Trial], sign: float
) -> dict[str, Value]:
    """Return the values that one of Optuna's samplers draws beside these trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # what a search does is told by the search
    study = optuna.create_study(sampler=sampler)
    for trial, goal in zip(known, goals_of(known, sign), strict=True):
        study.add_trial(as_optuna(space, trial, goal))
    for trial in running:
        study.add_trial(as_optuna(space, trial))
    return study.ask(dict(space)).params


def goals_of(trials: Sequence[Trial], sign: float) -> list[float | None]:
    """Return what each trial counts with, lower being better: the logarithm of its rank, so that one bad trial does not
    make all others look alike. One that diverged or failed counts as the worst; None where there is no score at all."""
    bests = [(trial.best(sign), trial.scores[-1:]) for trial in trials]
    scores = [sign * best if best is not None and math.isfinite(*last) else math.inf for best, last in bests]
    ranked = sorted(filter(math.isfinite, scores))
    return [math.log1p(ranked.index(min(score, ranked[-1]))) if ranked else None for score in scores]


def as_optuna(space: Space, trial: Trial, goal: float | None = None) -> optuna.trial.FrozenTrial:
    """Return a trial as Optuna has it: complete with this goal, or running."""
    import optuna

    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        state=states.RUNNING if goal is None else states.COMPLETE,
        value=goal,
        params=dict(trial.values),
        distributions=dict(space),
    )

"""The trials of a search as the jobs of a fleet: which comes next, whether it goes on, what it has come to.

`TrialSource` decides by its settings, by what the fleet tells it, and by what its record holds, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain_dagster.fleet.jobs import FleetError, FleetJob, FleetState, Outcome
from dtrain_dagster.search.sampling import draw_values
from dtrain_dagster.search.settings import LOSS, SearchSettings
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.study import StudyRecord
from dtrain_dagster.search.trials import Trial, TrialSeconds, TrialState, best_trial, why_ended
from trainer.documents.events import EvaluationEvent
from trainer.errors import ConfigError

NO_TRAINING = "no training: "
"""What the reason of a trial begins with whose values do not go together."""


MakeJob = Callable[[int, Mapping[str, Any], TrialSeconds], tuple[FleetJob, int]]
"""Makes the job of a trial from its number, its values and what trials take, and tells how often it is evaluated in
all. It raises `ConfigError` for values that do not go together."""
Draw = Callable[[int, Sequence[Trial], Sequence[Trial]], Mapping[str, Any] | None]
"""Returns the values of a trial by its number, the trials whose results count, and those that are not known yet; None
where there are no more."""


class TrialSource:
    """The trials of one search."""

    waiting_ahead = 1

    def __init__(
        self, space: Space, settings: SearchSettings, make_job: MakeJob, record: StudyRecord, expected: TrialSeconds,
        draw: Draw | None = None,
    ) -> None:  # fmt: skip
        """``expected``: what a trial takes, as known before the first one; ``draw``: what gives trials their values;
        None: the sampler of the settings."""
        self.space, self.settings = space, settings
        self._make_job, self._record, self._expected = make_job, record, expected
        self._trials: list[Trial] = []
        self._numbers: dict[str, int] = {}
        self._draw = draw or self._sample
        self._is_exhausted = False

    @property
    def trials(self) -> Sequence[Trial]:
        """Return all trials so far, in order."""
        return tuple(self._trials)

    @property
    def best(self) -> Trial | None:
        """Return the trial with the best score."""
        return best_trial(self._trials, self.settings.sign)

    @property
    def running(self) -> Sequence[Trial]:
        """Return the trials that are not over."""
        return tuple(trial for trial in self._trials if not trial.state.is_final)

    def resume(self, given: Sequence[FleetJob]) -> Collection[str]:
        """Take over the trials of these jobs as the study holds them. A trial whose values do not go together had no
        job."""
        left = list(reversed(given))
        while left:
            trial = self._record.begun(len(self._trials))
            if trial is None:
                raise FleetError(
                    f"the study of this search lacks trial {len(self._trials)}, which its fleet has: begin it again "
                    "under another name"
                )
            if not trial.reason.startswith(NO_TRAINING):
                self._numbers[left.pop().job_id] = trial.number
            self._trials.append(trial if trial.state.is_final else replace(trial, scores=(), reason=""))
        return [job_id for job_id, number in self._numbers.items() if not self._trials[number].state.is_final]

    def next_job(self) -> FleetJob | None:
        """Return the next trial's job; None while one has to wait, and when there is none left."""
        while not self._is_exhausted and len(self._trials) < self.settings.trials:
            number = len(self._trials)
            if len(self.running) >= self.settings.parallel or not self._is_ready(number):
                return None
            known = self._known_to(number)
            trial = self._record.begun(number) or self._new_trial(number, known)
            if trial is None:
                self._is_exhausted = True
                return None
            try:
                job, of = self._make_job(number, trial.values, self._expected.learned_from(known))
            except ConfigError as error:
                self._begin(replace(trial, of=trial.of or 1))
                self._finish(replace(self._trials[number], state=TrialState.FAILED, reason=f"{NO_TRAINING}{error}"))
                continue
            self._begin(replace(trial, of=of))
            self._numbers[job.job_id] = number
            return job
        return None

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> str:
        """Return why a trial ends after these evaluations; "" where it goes on."""
        trial = self._trials[self._numbers[job_id]]
        kept = self._record.begun(trial.number)
        if kept is not None and kept.reason:
            self._trials[trial.number] = self._with(trial, evaluations[: len(kept.scores)])
            return kept.reason
        for count in range(len(trial.scores) + 1, len(evaluations) + 1):
            trial = self._with(trial, evaluations[:count])
            self._trials[trial.number] = trial
            reason = why_ended(self.settings.pruner, trial, self._rivals_of(trial), self.settings.sign)
            if reason:
                self._record.decide(replace(trial, reason=reason))
                return reason
        return ""

    def on_end(self, job_id: str, outcome: Outcome) -> None:
        """Take note that a trial is over."""
        trial = self._trials[self._numbers[job_id]]
        if self.settings.repeatable and outcome.state is FleetState.SUCCEEDED:
            # That it ended before anyone looked is chance, which decides nothing where a seed gives the same trials.
            self.judge(job_id, outcome.evaluations)
        kept = self._record.begun(trial.number)
        is_late = outcome.state is FleetState.SUCCEEDED and not self.settings.repeatable  # its end came first
        if kept is not None and kept.reason and not is_late:  # evaluations after the decision came by chance
            trial = self._with(trial, outcome.evaluations[: len(kept.scores)])
            state, reason = TrialState.PRUNED, kept.reason
        else:
            trial = self._with(trial, outcome.evaluations)
            state = TrialState.COMPLETE if outcome.state is FleetState.SUCCEEDED else TrialState.FAILED
            reason = "" if state is TrialState.COMPLETE else outcome.reason
        self._finish(replace(trial, state=state, reason=reason, usd=outcome.usd, node_seconds=outcome.node_seconds))

    def _new_trial(self, number: int, known: Sequence[Trial]) -> Trial | None:
        """Return a new trial; None where there are no more values."""
        values = self._draw(number, known, self._others(known))
        if values is None:
            return None
        return Trial(number=number, values=values, of=0, known=tuple(sorted(trial.number for trial in known)))

    def _sample(self, number: int, known: Sequence[Trial], running: Sequence[Trial]) -> Mapping[str, Any] | None:
        settings = self.settings
        return draw_values(self.space, settings.sampler, settings.seed, number, known, running, settings.sign)

    def _others(self, known: Sequence[Trial]) -> list[Trial]:
        """Return the trials that are not known yet, by their values: how far they have come is chance."""
        chosen = {trial.number for trial in known}
        others = [trial for trial in self._trials if trial.number not in chosen]
        return [replace(trial, scores=(), times=(), steps=(), state=TrialState.RUNNING) for trial in others]

    def _is_ready(self, number: int) -> bool:
        """Return whether all has ended that the trial must know."""
        return not self.settings.repeatable or all(
            trial.state.is_final for trial in self._trials[: self._horizon(number)]
        )

    def _known_to(self, number: int) -> list[Trial]:
        """Return the trials over whose results count for this one."""
        trials = self._trials[: self._horizon(number)] if self.settings.repeatable else self._trials
        return [trial for trial in trials if trial.state.is_final and trial.number != number]

    def _rivals_of(self, trial: Trial) -> list[Trial]:
        """Return the trials that a running one is compared with."""
        if self.settings.repeatable:
            return self._known_to(trial.number)
        return [other for other in self._trials if other.number != trial.number]

    def _horizon(self, number: int) -> int:
        return max(0, number - self.settings.parallel + 1)

    def _with(self, trial: Trial, evaluations: Sequence[EvaluationEvent]) -> Trial:
        """Return the trial with these evaluations."""
        return replace(
            trial,
            scores=tuple(score_of(item, self.settings.metric) for item in evaluations),
            times=tuple(item.time for item in evaluations),
            steps=tuple(item.step or 0 for item in evaluations),
        )

    def _begin(self, trial: Trial) -> None:
        if self._record.begun(trial.number) is None:
            self._record.begin(trial)
        self._trials.append(replace(trial, scores=(), reason=""))

    def _finish(self, trial: Trial) -> None:
        self._trials[trial.number] = trial
        self._record.end(trial)


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

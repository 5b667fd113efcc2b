"""The trials of a search as the jobs of a fleet: which comes next, whether it goes on, what it has come to.

`TrialSource` decides by its settings, by what the fleet tells it, and by what its record holds, and by nothing else. So
it can be made again and brought to the same state by the same calls, as a fleet does after its orchestrator was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Outcome
from dtrain_dagster.fleet.source import CONTINUE, Verdict
from dtrain_dagster.search.costing import TrialSeconds, learned_seconds, seconds_of
from dtrain_dagster.search.curves import Curve, Mixture
from dtrain_dagster.search.outlook import Outlook, outlook_of
from dtrain_dagster.search.pruning import DIVERGED, Pruner, halve, has_diverged, marks_of
from dtrain_dagster.search.sampling import Sampler, draw_values
from dtrain_dagster.search.settings import LOSS, SearchSettings
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.study import TrialRecord
from dtrain_dagster.search.trials import Trial, TrialState, best_trial
from dtrain_dagster.search.worth import Fresh, judge_worth, prospect_of
from trainer.documents.events import EvaluationEvent
from trainer.errors import ConfigError

NO_TRAINING = "no training: "
"""What the reason of a trial begins with whose values do not go together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJob:
    """A trial's job."""

    job: FleetJob
    of: int
    """Evaluations that it has in all."""


MakeJob = Callable[[int, Mapping[str, Any], TrialSeconds], TrialJob]
"""Makes the job of a trial from its number, its values and what trials take. It raises `ConfigError` for values that do
not go together."""


Draw = Callable[[int, Sequence[Trial], Sequence[Trial]], Mapping[str, Any] | None]
"""Returns the values of a trial by its number, the trials whose results count, and those that are not known yet; None
where there are no more."""


class TrialSource:
    """The trials of one search."""

    waiting_ahead = 1

    def __init__(
        self,
        space: Space,
        settings: SearchSettings,
        make_job: MakeJob,
        record: TrialRecord,
        expected: TrialSeconds,
        usd_per_node_hour: float,
        nodes: float = 1.0,
        draw: Draw | None = None,
    ) -> None:
        """``expected``: what a trial takes, as known before the first one; ``nodes``: those that one has on average;
        ``draw``: what gives trials their values; None: the sampler of the settings."""
        self.space, self.settings = space, settings
        self._make_job, self._record = make_job, record
        self._expected, self._usd_per_node_hour, self._nodes = expected, usd_per_node_hour, nodes
        self._trials: list[Trial] = []
        self._numbers: dict[str, int] = {}
        self._draw_values = draw or self._sample
        self._next: tuple[tuple[int, ...], Mapping[str, Any] | None] | None = None
        """By which trials, with which values a fresh one would begin now."""
        self._is_exhausted = False
        self.ended = ""
        """Why no more trials come, where that was decided before the last one."""

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

    def usual_seconds(self) -> TrialSeconds:
        """Return what a trial takes, by what is known now."""
        return learned_seconds(self._expected, [trial for trial in self._trials if trial.state.is_final], self._nodes)

    def next_job(self) -> FleetJob | None:
        """Return the next trial's job; None while one has to wait, and when there is none left."""
        while not self._is_exhausted and len(self._trials) < self.settings.trials:
            number = len(self._trials)
            if len(self.running) >= self.settings.parallel or not self._is_ready(number):
                return None
            known = self._known_to(number)
            if self._is_over(known):
                return None
            trial = self._record.begun(number) or self._draw(number, known)
            if trial is None:
                self._is_exhausted = True
                return None
            usual = learned_seconds(self._expected, known, self._nodes)
            try:
                made = self._make_job(number, trial.values, usual)
            except ConfigError as error:
                self._begin(replace(trial, of=trial.of or 1))
                self._finish(replace(self._trials[number], state=TrialState.FAILED, reason=f"{NO_TRAINING}{error}"))
                continue
            self._begin(replace(trial, of=made.of))
            self._numbers[made.job.job_id] = number
            return made.job
        return None

    def judge(self, job_id: str, evaluations: Sequence[EvaluationEvent]) -> Verdict:
        """Return whether a trial goes on after these evaluations."""
        trial = self._trials[self._numbers[job_id]]
        kept = self._record.begun(trial.number)
        if kept is not None and kept.reason:
            self._trials[trial.number] = self._with(trial, evaluations[: len(kept.scores)], kept)
            return Verdict(kept.reason)
        seen = len(trial.scores)
        for count in range(seen + 1, len(evaluations) + 1):
            trial = self._with(trial, evaluations[:count])
            trial, reason = self._decide(trial)
            self._trials[trial.number] = trial
            if reason or trial.marks:
                self._record.decide(replace(trial, reason=reason))
            if reason:
                return Verdict(reason)
        return CONTINUE

    def on_end(self, job_id: str, outcome: Outcome) -> None:
        """Take note that a trial is over."""
        trial = self._trials[self._numbers[job_id]]
        if self.settings.repeatable and outcome.state is FleetState.SUCCEEDED:
            # That it ended before anyone looked is chance, which decides nothing where a seed gives the same trials.
            self.judge(job_id, outcome.evaluations)
        kept = self._record.begun(trial.number)
        is_late = outcome.state is FleetState.SUCCEEDED and not self.settings.repeatable  # its end came first
        if kept is not None and kept.reason and not is_late:  # evaluations after the decision came by chance
            trial = self._with(trial, outcome.evaluations[: len(kept.scores)], kept)
            state, reason = TrialState.PRUNED, kept.reason
        else:
            trial = self._with(trial, outcome.evaluations)
            state = TrialState.COMPLETE if outcome.state is FleetState.SUCCEEDED else TrialState.FAILED
            reason = "" if state is TrialState.COMPLETE else outcome.reason
        over = replace(trial, state=state, reason=reason, usd=outcome.usd, node_seconds=outcome.node_seconds)
        self._finish(replace(over, marks=marks_of(self.space, self.settings.pruner, over, self.settings.sign)))

    def _draw(self, number: int, known: Sequence[Trial]) -> Trial | None:
        """Return a new trial; None where there are no more values."""
        values = self._draw_values(number, known, self._others(known))
        if values is None:
            return None
        return Trial(number=number, values=values, of=0, known=tuple(sorted(trial.number for trial in known)))

    def _sample(self, number: int, known: Sequence[Trial], running: Sequence[Trial]) -> Mapping[str, Any] | None:
        settings = self.settings
        return draw_values(self.space, settings.sampler, settings.seed, number, known, running, settings.sign)

    def _others(self, known: Sequence[Trial]) -> list[Trial]:
        """Return the trials that are not known yet: where decisions have to repeat themselves, without how far they
        have come by now, which is chance."""
        chosen = {trial.number for trial in known}
        others = [trial for trial in self._trials if trial.number not in chosen]
        if not self.settings.repeatable:
            return others
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

    def _horizon(self, number: int) -> int:
        return max(0, number - self.settings.parallel + 1)

    def _is_over(self, known: Sequence[Trial]) -> bool:
        """Return whether a further trial is not worth its dollars, at the price that a person has set."""
        price = self.settings.worth_usd
        outlook = outlook_of(self.space, known, (), self.settings.sign) if price is not None else None
        if price is None or outlook is None:
            return False
        usual = self._seconds(known)
        fresh = usual.cost(self._usd_per_node_hour)
        prior = self._fresh_prior(outlook, known, len(self._trials) - 1)
        found = prospect_of(Curve((), usual.of), prior, outlook.floor, outlook.best, fresh)
        if found.per_usd * price < 1:
            self.ended = (
                f"no further trial is worth its cost: one would improve on the best by {found.gain:.2g} for "
                f"{found.usd:.2g} dollars, in expectation, at {price:g} dollars for an improvement by 1"
            )
        return bool(self.ended)

    def _decide(self, trial: Trial) -> tuple[Trial, str]:
        """Return the trial with its marks, and why it ends now; "" where it goes on."""
        if has_diverged(trial):
            return trial, DIVERGED
        settings, known = self.settings, self._known_to(trial.number)
        if settings.pruner in (Pruner.ASHA, Pruner.HYPERBAND):
            others = known if settings.repeatable else [item for item in self._trials if item.number != trial.number]
            found = halve(self.space, settings.pruner, trial, others, settings.sign, len(trial.scores) - 1)
            return found.trial, found.reason
        if settings.pruner is not Pruner.WORTH:
            return trial, ""
        beside = [] if settings.repeatable else [item for item in self.running if item.number != trial.number]
        curve = trial.curve(settings.sign)
        outlook = outlook_of(self.space, known, beside, settings.sign, curve)
        if outlook is None:
            return trial, ""
        here = outlook.prior_at(trial.values) if self._goes_by_values else outlook.prior
        fresh = self._fresh_prior(outlook, known, trial.number)
        usual = self._seconds(known)
        own = usual if settings.repeatable else seconds_of(trial, usual, self._nodes)
        verdict = judge_worth(
            curve,
            own.cost(self._usd_per_node_hour),
            here,
            Fresh(fresh, usual.cost(self._usd_per_node_hour), usual.of),
            outlook.floor,
            outlook.best,
            settings.worth_usd,
        )
        return trial, verdict.reason

    @property
    def _goes_by_values(self) -> bool:
        """Return whether curves are expected by their trials' values: where those of a fresh trial are chosen by what
        is known. Else they are not, of the trial that is judged either: who knows more of the one than of the other
        ends whatever he knows."""
        return self.settings.sampler is Sampler.MODEL

    def _fresh_prior(self, outlook: Outlook, known: Sequence[Trial], number: int) -> Mixture:
        """Return what is expected of the curve of a fresh trial, beside the trials up to ``number``."""
        if not self._goes_by_values or outlook.surface is None:
            return outlook.prior
        by = (number, *(trial.number for trial in known))
        if self._next is None or self._next[0] != by:
            beside = [trial for trial in self._others(known) if trial.number <= number]
            self._next = by, self._draw_values(number + 1, known, beside)
        values = self._next[1]
        return outlook.prior if values is None else outlook.prior_at(values)

    def _seconds(self, known: Sequence[Trial]) -> TrialSeconds:
        """Return what a trial takes as decisions have it: where they have to repeat themselves, as measured before the
        first trial, since bills differ from run to run."""
        repeats = self.settings.repeatable
        return self._expected if repeats else learned_seconds(self._expected, known, self._nodes)

    def _with(self, trial: Trial, evaluations: Sequence[EvaluationEvent], kept: Trial | None = None) -> Trial:
        """Return the trial with these evaluations, and with the marks that were kept of it."""
        return replace(
            trial,
            scores=tuple(score_of(item, self.settings.metric) for item in evaluations),
            times=tuple(item.time for item in evaluations),
            steps=tuple(item.step or 0 for item in evaluations),
            marks=kept.marks if kept is not None else trial.marks,
        )

    def _begin(self, trial: Trial) -> None:
        if self._record.begun(trial.number) is None:
            self._record.begin(trial)
        self._trials.append(replace(trial, scores=(), reason="", marks={}))

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

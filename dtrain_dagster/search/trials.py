"""What a search is asked for besides its space and the job that it varies, and its trials: what was drawn, what was
measured, how it ended, what one takes, and when one is ended early. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

LOSS = "loss"
MOST_TRIALS = 10_000
REDUCTION = 3
"""Of this many trials, one goes on to the next rung of successive halving."""
RUNGS = frozenset(REDUCTION**rung for rung in range(20))
"""Evaluations at which there is something to decide."""
DIVERGED = "diverged: its score is not a finite number"
NOT_AMONG_BEST = "not among the best at rung"


class Sampler(StrEnum):
    """How values are drawn. Launchpads show the names."""

    gp = "gp"
    """Where the best score is expected to improve the most, by Optuna's Gaussian process."""
    random = "random"
    """Each evenly from its range."""


class Pruner(StrEnum):
    """What ends trials early."""

    asha = "asha"
    """Asynchronous successive halving: after 1, 3, 9, … evaluations the best third goes on."""
    none = "none"
    """Every trial goes to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings:
    """How a search draws and judges its trials."""

    trials: int = 32
    """The largest number of trials."""
    parallel: int = 2
    """Trials that may run at once. Trial n knows exactly the trials up to n - ``parallel``, and waits for them to end:
    so the same seed gives the same trials, however long each takes."""
    sampler: Sampler = Sampler.gp
    pruner: Pruner = Pruner.asha
    seed: int = 0
    metric: str = LOSS
    """``loss`` of the validation split, or the name of a metric that the task measures there, such as ``accuracy``."""
    maximise: bool = False
    """Whether more of the metric is better."""

    @property
    def sign(self) -> float:
        """Return 1 where the metric is minimised, else -1."""
        return -1.0 if self.maximise else 1.0

    def decisive(self) -> dict[str, Any]:
        """Return what decides which trials the search has. More ``trials`` only continue it."""
        return {name: value for name, value in asdict(self).items() if name != "trials"}


class TrialState(StrEnum):
    """The state of a trial."""

    RUNNING = "running"
    COMPLETE = "complete"
    """It was trained to its end."""
    PRUNED = "pruned"
    """It was ended early by the search's own decision."""
    FAILED = "failed"
    """It could not be trained, or was ended by something else; what it had reached until then counts."""

    @property
    def is_final(self) -> bool:
        """Return whether the trial is over."""
        return self is not TrialState.RUNNING


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One trial."""

    number: int
    values: Mapping[str, Any]
    """Name of a parameter → its value."""
    of: int
    """Evaluations that it has in all if it goes to its end."""
    scores: tuple[float, ...] = ()
    """The metric at each evaluation."""
    times: tuple[float, ...] = ()
    """Unix time of each evaluation."""
    steps: tuple[int, ...] = ()
    """Optimizer steps done at each evaluation."""
    state: TrialState = TrialState.RUNNING
    reason: str = ""
    """Why it was ended early, or failed."""
    usd: float = 0.0
    node_seconds: float = 0.0
    """What was paid for it; 0 while it runs."""

    def best(self, sign: float) -> float | None:
        """Return the best score of the metric itself; None where there is none that is finite. ``sign``: 1 for a metric
        that is minimised, else -1."""
        finite = [score for score in self.scores if math.isfinite(score)]
        return sign * min(sign * score for score in finite) if finite else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSeconds:
    """What a trial takes, in node-seconds."""

    startup: float
    """From the purchase of its nodes to its first step."""
    training: float
    """All of its steps and evaluations."""
    of: int
    """Its evaluations."""
    finish: float
    """From its last evaluation to its end."""

    @property
    def evaluation(self) -> float:
        """Return what one evaluation takes, with the steps before it."""
        return self.training / self.of

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.startup + self.training + self.finish


def best_trial(trials: Sequence[Trial], sign: float) -> Trial | None:
    """Return the trial with the best score, of equals the first; None where none was evaluated."""
    scored = [(sign * score, trial.number, trial) for trial in trials if (score := trial.best(sign)) is not None]
    return min(scored)[2] if scored else None


def is_decision(reason: str) -> bool:
    """Return whether this is what `why_ended` says."""
    return reason == DIVERGED or reason.startswith(NOT_AMONG_BEST)


def why_ended(pruner: Pruner, trial: Trial, others: Iterable[Trial], sign: float) -> str:
    """Return why a trial ends after its last evaluation; "" where it goes on. ``others``: what is known of the others.

    This is the rule of asynchronous successive halving (Li et al., 2020). Optuna's pruner has the same, but goes by
    marks that trials leave in a storage as they run: by what had run by chance, so a seed would not give the same
    trials.
    """
    count = len(trial.scores)
    if trial.scores and not math.isfinite(trial.scores[-1]):
        return DIVERGED
    if pruner is Pruner.none or count not in RUNGS or count >= trial.of:
        return ""
    known = [sign * other.scores[count - 1] for other in others if len(other.scores) >= count]
    own = sign * trial.scores[-1]
    rivals = sorted([own, *(score for score in known if math.isfinite(score))])
    if own <= rivals[max(0, len(rivals) // REDUCTION - 1)]:
        return ""
    rung = round(math.log(count, REDUCTION)) + 1
    return f"{NOT_AMONG_BEST} {rung}, after {count} evaluation(s)"

"""What trials cost: expected beforehand, learned from those that are over, and by a running trial's own pace. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dtrain_dagster.search.trials import Trial, TrialState
from dtrain_dagster.search.worth import TrialCost


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

    def cost(self, usd_per_node_hour: float) -> TrialCost:
        """Return the same in dollars."""
        rate = usd_per_node_hour / 3600
        return TrialCost(
            startup_usd=self.startup * rate, evaluation_usd=self.evaluation * rate, finish_usd=self.finish * rate
        )


def pace(trial: Trial, nodes: float) -> float | None:
    """Return the node-seconds from one evaluation of a trial to the next: the median, so that a pause or a lost node
    does not count. None where it had not two yet."""
    gaps = [after - before for before, after in pairwise(trial.times)]
    return nodes * max(1e-9, statistics.median(gaps)) if gaps else None


def learned_seconds(expected: TrialSeconds, over: Sequence[Trial], nodes: float) -> TrialSeconds:
    """Return what trials take by the bills of those that are over; ``expected`` where they say nothing. ``nodes``:
    those that a trial has, on average."""
    billed = [trial for trial in over if trial.node_seconds > 0 and trial.scores]
    if not billed:
        return expected
    each = {trial.number: pace(trial, nodes) for trial in billed}
    usual = statistics.median([value for value in each.values() if value is not None] or [expected.evaluation])
    fixed: dict[bool, list[float]] = {True: [], False: []}
    for trial in billed:
        own = each[trial.number] or usual
        rest = max(0.0, trial.node_seconds - own * len(trial.scores))
        fixed[trial.state is TrialState.COMPLETE].append(rest)
    whole = statistics.median(fixed[True]) if fixed[True] else expected.startup + expected.finish
    share = expected.startup / max(1e-9, expected.startup + expected.finish)
    startup = min(whole, statistics.median(fixed[False])) if fixed[False] else share * whole
    return TrialSeconds(startup=startup, training=usual * expected.of, of=expected.of, finish=whole - startup)


def seconds_of(trial: Trial, usual: TrialSeconds, nodes: float) -> TrialSeconds:
    """Return what a running trial takes, by its own pace where it has one."""
    own = pace(trial, nodes) or usual.evaluation * usual.of / trial.of
    return TrialSeconds(startup=usual.startup, training=own * trial.of, of=trial.of, finish=usual.finish)

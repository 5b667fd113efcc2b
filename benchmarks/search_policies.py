"""Policies of a search played on learning curves that were recorded: the decisions are `TrialSource`'s own, the clock
and the fleet are played.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from dtrain_dagster.costs.money import SECOND, nano_usd
from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Standing
from dtrain_dagster.search.sampling import RANDOM_FIRST, as_optuna, ask_for_values
from dtrain_dagster.search.settings import Sampler, SearchSettings
from dtrain_dagster.search.source import Draw, TrialSource
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.trials import Trial, TrialSeconds
from trainer.documents.events import EvaluationEvent

USD_PER_NODE_HOUR = 3.06


@dataclass(frozen=True, slots=True)
class Recorded:
    """A real training, as it went."""

    values: Mapping[str, Any]

    scores: Sequence[float]
    """The validation loss at each evaluation."""
    evaluation_seconds: float
    """From one evaluation to the next, in the middle."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The trainings that a search can have."""

    space: Space
    rows: Sequence[Recorded]
    by_values: Mapping[str, Recorded]

    def drawer(self, settings: SearchSettings) -> Draw:
        """Return what gives trials their values, each training once: in an order of the seed, or, for the sampler that
        chooses by what is known, the one that this sampler finds best of those that are left."""
        order = [self.rows[place] for place in np.random.default_rng(settings.seed).permutation(len(self.rows))]

        def draw(number: int, known: Sequence[Trial], running: Sequence[Trial]) -> Mapping[str, Any] | None:
            taken = {mark_of(trial.values) for trial in [*known, *running]}
            left = [row.values for row in order if mark_of(row.values) not in taken]
            if settings.sampler is not Sampler.gp or not left:
                return left[0] if left else None
            sampler = OneOf(self.space, left, settings.seed)
            ask_for_values(self.space, sampler, known, running, settings.sign)
            return left[sampler.chosen]

        return draw


class OneOf(optuna.samplers.GPSampler):
    """Optuna's Gaussian process, which chooses among given values instead of from the whole space."""

    def __init__(self, space: Space, left: Sequence[Mapping[str, Any]], seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=RANDOM_FIRST)
        self.chosen = 0
        """The place of the values that it chose; the first while it does not know enough."""
        self._left = [as_optuna(space, Trial(number=0, values=values, of=1), 0.0) for values in left]

    def _optimize_acqf(self, acqf: Any, best_params: Any) -> Any:
        """Return the given values with the best acquisition: the method that Optuna has for another optimizer."""
        places = acqf.search_space.get_normalized_params(self._left)
        self.chosen = int(np.argmax(acqf.eval_acqf_no_grad(places)))
        return places[self.chosen]


def pool_of(space: Space, rows: Sequence[Recorded]) -> Pool:
    """Return the pool of these trainings."""
    return Pool(space, rows, {mark_of(row.values): row for row in rows})


def mark_of(values: Mapping[str, Any]) -> str:
    """Return what tells values apart."""
    return json.dumps(dict(values), sort_keys=True)


@dataclass(slots=True)
class Played:
    """What a policy did until it reached a score, or came to its last trial."""

    usd: float = 0.0
    trials: int = 0
    evaluations: int = 0
    is_reached: bool = False
    best: float = float("inf")


def play(pool: Pool, usual: TrialSeconds, settings: SearchSettings, draw: Draw, target: float | None = None) -> Played:
    """Play a search of the pool's trainings until it has a score of ``target`` or better (None: to its end).
    ``usual``: what a trial takes; ``draw``: see `TrialSource`."""
    of, going = usual.of, dict[str, Recorded]()

    def make_job(number: int, values: Mapping[str, Any], now: TrialSeconds) -> tuple[FleetJob, int]:
        job = FleetJob(job_id=f"{number:04d}", node_seconds=now.training)
        going[job.job_id] = pool.by_values[mark_of(values)]
        return job, of

    source = TrialSource(pool.space, settings, make_job, usual, draw=draw)
    played, running, waiting = Played(), dict[str, tuple[float, list[EvaluationEvent]]](), list[tuple[float, str]]()
    paid, now = 0.0, 0.0

    def end(job_id: str, state: FleetState, at: float) -> None:
        nonlocal paid
        began, told = running.pop(job_id)
        paid += at - began
        units = round((at - began) * SECOND) * nano_usd(USD_PER_NODE_HOUR)
        job = FleetJob(job_id=job_id, node_seconds=at - began)
        ended = Standing(job=job, number=0, state=state, paid_units=units, node_seconds=at - began)
        source.on_end(ended, tuple(told))

    while True:
        while (job := source.next_job()) is not None:
            running[job.job_id] = (now, [])
            played.trials += 1
            heapq.heappush(waiting, (now + usual.startup + going[job.job_id].evaluation_seconds, job.job_id))
        if not waiting:
            break
        now, job_id = heapq.heappop(waiting)
        row = going[job_id]
        told = running[job_id][1]
        if len(told) == of:
            end(job_id, FleetState.SUCCEEDED, now)
            continue
        score = row.scores[len(told)]
        told.append(EvaluationEvent(time=now, split="valid", step=len(told) + 1, loss=score))
        played.evaluations += 1
        played.best = min(played.best, score)
        if target is not None and score <= target:
            played.is_reached = True
            break
        if source.judge(job_id, tuple(told)):
            end(job_id, FleetState.ENDED, now)
        elif len(told) == of:
            heapq.heappush(waiting, (now + usual.finish, job_id))
        else:
            heapq.heappush(waiting, (now + row.evaluation_seconds, job_id))
    paid += sum(now - began for began, _ in running.values())
    played.usd = paid * USD_PER_NODE_HOUR / 3600
    return played

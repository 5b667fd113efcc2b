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

from dtrain_dagster.costs.money import SECOND, nano_usd
from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Outcome
from dtrain_dagster.search.costing import TrialSeconds
from dtrain_dagster.search.outlook import outlook_of
from dtrain_dagster.search.sampling import Sampler
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.source import Draw, TrialJob, TrialSource
from dtrain_dagster.search.space import Space
from dtrain_dagster.search.study import MemoryRecord
from dtrain_dagster.search.surface import place_of
from dtrain_dagster.search.trials import Trial
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
            if settings.sampler is Sampler.MODEL and left:
                outlook = outlook_of(self.space, known, running, settings.sign)
                if outlook is not None and outlook.surface is not None:
                    places = np.array([place_of(self.space, values) for values in left])
                    return left[int(np.argmax(outlook.gains(places)))]
            return left[0] if left else None

        return draw


def pool_of(space: Space, rows: Sequence[Recorded]) -> Pool:
    """Return the pool of these trainings."""
    return Pool(space, rows, {mark_of(row.values): row for row in rows})


def mark_of(values: Mapping[str, Any]) -> str:
    """Return what tells values apart."""
    return json.dumps(dict(values), sort_keys=True)


@dataclass(slots=True)
class Played:
    """What a policy did until it reached a score, or came to its last trial, and its trials as they were then."""

    usd: float = 0.0
    trials: int = 0
    evaluations: int = 0
    is_reached: bool = False
    best: float = float("inf")
    ended: tuple[Trial, ...] = ()


def play(
    pool: Pool, usual: TrialSeconds, settings: SearchSettings, target: float | None = None,
    actual: TrialSeconds | None = None, draw: Draw | None = None,
) -> Played:  # fmt: skip
    """Play a search of the pool's trainings until it has a score of ``target`` or better (None: to its end).
    ``usual``: what the search takes a trial to take; ``actual``: what a start and a finish do take, where that is
    something else; ``draw``: see `TrialSource`."""
    of, going, real = usual.of, dict[str, Recorded](), actual or usual

    def make_job(number: int, values: Mapping[str, Any], now: TrialSeconds) -> TrialJob:
        job = FleetJob(job_id=f"{number:04d}", node_seconds=now.training)
        going[job.job_id] = pool.by_values[mark_of(values)]
        return TrialJob(job=job, of=of)

    source = TrialSource(pool.space, settings, make_job, MemoryRecord(), usual, USD_PER_NODE_HOUR, draw=draw)
    played, running, waiting = Played(), dict[str, tuple[float, list[EvaluationEvent]]](), list[tuple[float, str]]()
    paid, now = 0.0, 0.0

    def end(job_id: str, state: FleetState, at: float) -> None:
        nonlocal paid
        began, told = running.pop(job_id)
        paid += at - began
        units = round((at - began) * SECOND) * nano_usd(USD_PER_NODE_HOUR)
        source.on_end(job_id, Outcome(state=state, paid_units=units, node_seconds=at - began, evaluations=tuple(told)))

    while True:
        while (job := source.next_job()) is not None:
            running[job.job_id] = (now, [])
            played.trials += 1
            heapq.heappush(waiting, (now + real.startup + going[job.job_id].evaluation_seconds, job.job_id))
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
        if source.judge(job_id, tuple(told)).ends:
            end(job_id, FleetState.ENDED, now)
        elif len(told) == of:
            heapq.heappush(waiting, (now + real.finish, job_id))
        else:
            heapq.heappush(waiting, (now + row.evaluation_seconds, job_id))
    paid += sum(now - began for began, _ in running.values())
    played.usd = paid * USD_PER_NODE_HOUR / 3600
    played.ended = tuple(source.trials)
    return played

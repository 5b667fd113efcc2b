"""Policies of a search played on learning curves that were recorded: the decisions are `TrialSource`'s own, the clock
and the fleet are played.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain_dagster.costs.money import SECOND, nano_usd
from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Outcome
from dtrain_dagster.search.costing import TrialSeconds
from dtrain_dagster.search.pruning import Pruner
from dtrain_dagster.search.sampling import Sampler
from dtrain_dagster.search.settings import SearchSettings
from dtrain_dagster.search.source import TrialJob, TrialSource
from dtrain_dagster.search.space import Choices, Parameter, Space
from dtrain_dagster.search.study import MemoryRecord
from trainer.documents.events import EvaluationEvent

USD_PER_NODE_HOUR = 3.06
ROW = "row"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A real training, as it went."""

    scores: Sequence[float]
    """The validation loss at each evaluation."""
    evaluation_seconds: float
    """From one evaluation to the next, in the middle."""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Played:
    """What a policy did until it reached a score, or came to its last trial."""

    usd: float = 0.0
    trials: int = 0
    evaluations: int = 0
    is_reached: bool = False
    best: float = float("inf")


def play(
    pool: Sequence[Recorded], usual: TrialSeconds, pruner: Pruner, seed: int, parallel: int, trials: int,
    target: float | None, repeatable: bool,
) -> Played:  # fmt: skip
    """Play a search of ``trials`` trials, which are the rows of the pool in an order of the seed, until it has a score
    of ``target`` or better (None: to its end)."""
    of = len(pool[0].scores)
    rows = Parameter(name=ROW, field="training.seed", domain=Choices(values=tuple(range(len(pool)))))
    settings = SearchSettings(
        trials=trials, parallel=parallel, sampler=Sampler.GRID, pruner=pruner, seed=seed, repeatable=repeatable
    )

    def make_job(number: int, values: Mapping[str, Any], now: TrialSeconds) -> TrialJob:
        return TrialJob(job=FleetJob(job_id=f"{number}-{values[ROW]}", node_seconds=now.training), of=of)

    source = TrialSource(Space((rows,)), settings, make_job, MemoryRecord(), usual, USD_PER_NODE_HOUR)
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
            each = pool[int(job.job_id.partition("-")[2])].evaluation_seconds
            heapq.heappush(waiting, (now + usual.startup + each, job.job_id))
        if not waiting:
            break
        now, job_id = heapq.heappop(waiting)
        row = pool[int(job_id.partition("-")[2])]
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
            heapq.heappush(waiting, (now + usual.finish, job_id))
        else:
            heapq.heappush(waiting, (now + row.evaluation_seconds, job_id))
    paid += sum(now - began for began, _ in running.values())
    played.usd = paid * USD_PER_NODE_HOUR / 3600
    return played

"""A fleet that is played: it runs the trials of a source in virtual time, on curves that a function gives."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dtrain_dagster.costs.money import SECOND, nano_usd
from dtrain_dagster.fleet.jobs import FleetJob, FleetState, Standing
from dtrain_dagster.search.source import TrialSource
from dtrain_dagster.search.space import parse_space
from dtrain_dagster.search.trials import SearchSettings, TrialSeconds
from trainer.documents.events import EvaluationEvent

SPACE = parse_space(
    {
        "training.learning_rate": {"low": 1e-4, "high": 1.0, "log": True},
        "training.weight_decay": {"low": 0.0, "high": 1.0},
        "training.schedule": ["cosine", "constant"],
    }
)
OF, EACH, USUAL = 9, 10.0, TrialSeconds(startup=5.0, training=90.0, of=9, finish=2.0)
PRICE = 3.6
Calls = list[tuple[str, tuple[Standing, tuple[EvaluationEvent, ...]] | None]]


def score(values: Mapping[str, Any], place: int) -> float:
    """A curve that falls to a level which is best at a learning rate of 0.01."""
    import math

    level = 0.1 + 0.2 * abs(math.log10(values["training.learning_rate"]) + 2) + 0.1 * values["training.weight_decay"]
    return level + 1.5 / place


def make_job(number: int, values: Mapping[str, Any]) -> tuple[FleetJob, int]:
    return FleetJob(job_id=f"trial-{number}", node_seconds=USUAL.training), OF


def standing_of(job_id: str, state: FleetState, reason: str = "") -> Standing:
    return Standing(job=FleetJob(job_id=job_id, node_seconds=1.0), number=0, state=state, reason=reason)


def source_of(settings: SearchSettings) -> TrialSource:
    return TrialSource(SPACE, settings, make_job)


def play(
    source: TrialSource,
    calls: Calls,
    delay: Callable[[int, int], float] = lambda number, place: 0.0,
    curve: Callable[[Mapping[str, Any], int], float] = score,
    stop_after: int = 10**9,
) -> TrialSource:
    """Run the source's trials; ``calls`` takes what a fleet was given and has told. ``delay``: seconds by which an
    evaluation comes late; ``stop_after``: evaluations after which the orchestrator is killed."""
    running: dict[str, list[EvaluationEvent]] = {}
    begun: dict[str, float] = {}
    waiting: list[tuple[float, str]] = []
    now, seen = 0.0, 0

    def start(job_id: str) -> None:
        running[job_id], begun[job_id] = [], now
        heapq.heappush(waiting, (now + USUAL.startup + EACH, job_id))

    def end(job_id: str, state: FleetState) -> None:
        told = tuple(running.pop(job_id))
        seconds = now - begun[job_id]
        units = round(seconds * SECOND) * nano_usd(PRICE)
        ended = replace(standing_of(job_id, state), paid_units=units, node_seconds=seconds)
        calls.append((job_id, (ended, told)))
        source.on_end(ended, told)

    for job_id in [job_id for job_id, outcome in calls if outcome is None and not any(
        other == job_id and ended for other, ended in calls)]:  # fmt: skip
        start(job_id)  # trials go on, with or without an orchestrator
    while True:
        while (job := source.next_job()) is not None:
            calls.append((job.job_id, None))
            if job.problem:
                source.on_end(standing_of(job.job_id, FleetState.FAILED, job.problem), ())
            else:
                start(job.job_id)
        if not waiting or seen >= stop_after:
            return source
        now, job_id = heapq.heappop(waiting)
        if job_id not in running:
            continue
        told, number = running[job_id], int(job_id.rpartition("-")[2])
        if len(told) == OF:
            end(job_id, FleetState.SUCCEEDED)
            continue
        place = len(told) + 1
        told.append(
            EvaluationEvent(time=now, split="valid", step=10 * place, loss=curve(source.trials[number].values, place))
        )
        seen += 1
        if source.judge(job_id, tuple(told)):
            end(job_id, FleetState.ENDED)
        else:
            heapq.heappush(waiting, (now + (USUAL.finish if place == OF else EACH + delay(number, place)), job_id))


def resume(source: TrialSource, calls: Calls, before: TrialSource) -> None:
    """Bring a new source to the state of the one before, as a fleet does with its record."""
    facts = {f"trial-{trial.number}": trial for trial in before.trials}
    given = [
        FleetJob(
            job_id=job_id, node_seconds=1.0,
            facts={"values": facts[job_id].values, "of": facts[job_id].of},
        )
        for job_id, outcome in calls
        if outcome is None
    ]  # fmt: skip
    ends = {job_id: outcome for job_id, outcome in calls if outcome is not None}
    for job_id in source.resume(given):
        if job_id in ends:
            source.on_end(*ends[job_id])

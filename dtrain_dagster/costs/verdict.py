"""The verdict on a whole training: what held its steps up, and what of the paid time trained. Pure.

The performance report, the live page of a job that has ended and the saved page all take it from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.costs.ledger import IN_STEPS, Ledger
from dtrain_dagster.costs.money import SECOND
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause, diagnose

LOW_GOODPUT = 0.5
"""The share of paid node-time below which the verdict mentions it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """The share of the paid node-time that trained. Repeated steps count once."""

    share: float
    trained_node_seconds: float
    paid_node_seconds: float
    elsewhere: dict[str, float]
    """The node-seconds that did not train, by cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobVerdict:
    """The verdict on a training that has ended."""

    words: str
    """The bottleneck in one sentence, with its evidence."""
    diagnosis: Diagnosis
    goodput: Goodput


def judge_job(events: Sequence[Mapping[str, Any]], found: Ledger) -> JobVerdict:
    """Return the verdict on a training from all of its events and its ledger."""
    diagnosis, good = diagnose(events), goodput(found)
    return JobVerdict(words=describe_performance(diagnosis, good), diagnosis=diagnosis, goodput=good)


def describe_performance(diagnosis: Diagnosis, good: Goodput) -> str:
    """Return the bottleneck and its evidence in words, and the largest other use of the paid time, where little of it
    trained."""
    if diagnosis.cause is SlowdownCause.UNKNOWN:
        first = diagnosis.evidence
    elif diagnosis.cause is SlowdownCause.HEALTHY:
        first = f"Healthy: nothing holds the steps up. {diagnosis.evidence}"
    else:
        cost = f", {diagnosis.share:.0%} of training time" if diagnosis.share >= 0.005 else ""
        where = diagnosis.where
        first = f"{where[0].upper()}{where[1:]}{cost}. {diagnosis.evidence}"
    return f"{first} {describe_goodput(good)}".strip()


def describe_goodput(good: Goodput, succeeded: bool = True) -> str:
    """Return what took the paid time that did not train, in words; "" where most of it trained. Of a training that did
    not succeed, a longer one is not advised."""
    if good.share >= LOW_GOODPUT or not good.elsewhere:
        return ""
    name, seconds = max(good.elsewhere.items(), key=lambda item: item[1])
    words = f"Only {good.share:.0%} of the paid node-time trained: {name} took {seconds / good.paid_node_seconds:.0%}"
    return f"{words}; a longer training makes that share smaller." if succeeded else f"{words}."


def goodput(found: Ledger) -> Goodput:
    """Return the goodput of a ledger: the time of steps that counted, and of every other cause."""
    causes = {cause: row.seconds for cause, row in found.causes().items()}
    return Goodput(
        share=found.goodput,
        trained_node_seconds=sum(causes.get(cause, 0.0) for cause in IN_STEPS),
        paid_node_seconds=found.microseconds / SECOND,
        elsewhere={str(cause): seconds for cause, seconds in causes.items() if cause not in IN_STEPS},
    )

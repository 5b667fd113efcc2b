"""The verdict on a whole training: what held its steps up, and what of the paid time trained. Pure.

The performance report, the live page of a job that has ended and the saved page all take it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain_dagster.costs.ledger import IN_STEPS, Ledger
from dtrain_dagster.costs.money import SECOND
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import NodeCost
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause
from dtrain_dagster.support.formatting import dollars, format_duration

NEGLIGIBLE = 0.01
"""Share of the estimate below which reasons are merged."""
STARTING = (CostCause.PROVISIONING, CostCause.PREFLIGHT, CostCause.STARTUP)

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


def describe_performance(diagnosis: Diagnosis, good: Goodput) -> str:
    """Return the bottleneck and its evidence, and the largest other use of paid time where little of it trained."""
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
    """Return what took the paid time that did not train, in words; "" where most of it trained."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """A part of actual minus estimated dollars."""

    usd: float
    words: str


def reasons(plan: TrainingPlan, nodes: Sequence[NodeCost], found: Ledger, steps: int) -> list[Reason]:
    """Return the reasons, the largest first; they add up to paid minus expected dollars."""
    rate, count = plan.estimate.usd_per_node_hour / 3600, plan.node_count
    paid, usd = sum(node.hours for node in nodes) * 3600, sum(node.usd for node in nodes)
    told: list[Reason] = []
    if paid and abs(usd - paid * rate) > 1e-6 * usd:
        kinds = sorted({f"{node.sku} ({node.tier})" for node in nodes})
        words = (
            f"the price per node-hour was {dollars(3600 * usd / paid)} ({', '.join(kinds)}), instead of the planned "
            f"{dollars(3600 * rate)} ({plan.sku}, {plan.tier})"
        )
        told.append(Reason(usd=usd - paid * rate, words=words))
    causes = {cause: row.seconds for cause, row in found.causes().items()}
    if lost := causes.get(CostCause.LOST, 0.0):
        words = (
            f"{format_duration(lost)} of nodes were lost to failures: redone, noticed, regrouped, or paid for in vain"
        )
        told.append(Reason(usd=lost * rate, words=words))
    if 0 < steps != plan.work.steps:
        in_steps = sum(causes.get(cause, 0.0) for cause in IN_STEPS) / steps * (steps - plan.work.steps)
        words = f"{steps:,} steps were trained, instead of the planned {plan.work.steps:,}"
        told.append(Reason(usd=in_steps * rate, words=words))
    for name, phase, which in (("start-up", "startup", STARTING), ("the finish", "finish", (CostCause.FINISH,))):
        if phase in plan.phases:
            more = sum(causes.get(cause, 0.0) for cause in which) - count * plan.phases[phase] * plan.learned_factor
            words = f"{name} took {_more(more / count)} than expected, on each node"
            told.append(Reason(usd=more * rate, words=words))
    expected = plan.estimate.usd.expected
    large = [item for item in told if abs(item.usd) >= NEGLIGIBLE * expected]
    rest = usd - expected - sum(item.usd for item in large)
    words = f"all that remains took {_more(rest / rate / count)} than estimated, on each node"
    return sorted([*large, Reason(usd=rest, words=words)], key=lambda item: -abs(item.usd))


def explain_variance(told: Sequence[Reason], usd: float, expected: float) -> str:
    """Return all of it for a person: ``$0.012 (9 %) above the estimate: …``."""
    more = usd - expected
    share = f" ({abs(more) / expected:.0%})" if expected else ""
    said = "; ".join(f"{item.words} ({'+' if item.usd >= 0 else '−'}{dollars(abs(item.usd))})" for item in told)
    return f"{dollars(abs(more))}{share} {'above' if more >= 0 else 'below'} the estimate: {said}."


def _more(seconds: float) -> str:
    size = f"{abs(seconds):.1f} s" if abs(seconds) < 60 else format_duration(abs(seconds))
    return f"{size} {'longer' if seconds >= 0 else 'less'}"

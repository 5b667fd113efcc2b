"""What the dollars of a job bought, and the verdict on the whole of a job that has ended: both from all of its events.

Nobody asks for it every second: all events are read anew, except the samples of nodes, which neither of the two needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.costs.export import ledger_rows
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.money import SECOND, digits_of, total_shown
from dtrain_dagster.costs.plan import PLAN, probe_usage_of
from dtrain_dagster.costs.prices import PriceError, price_words
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.verdict import describe_goodput, judge_job
from dtrain_dagster.jobs.totals import launched_usage
from dtrain_dagster.monitoring.alerts import best, describe_strategy
from dtrain_dagster.monitoring.diagnosis import Diagnosis, SlowdownCause, diagnose
from dtrain_dagster.monitoring.strategies import strategies
from dtrain_dagster.monitoring.windows import settled, windows
from dtrain_dagster.settings.tiers import Tier
from dtrain_dagster.support.formatting import dollars, format_duration
from trainer.documents.presences import NodePresence, stale_seconds
from trainer.rundir import LAUNCH, RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountRow:
    """A cause that paid time was spent on, in words."""

    cause: str
    meaning: str
    duration: str
    share: float
    """Of the paid node-time, from 0 to 1."""
    usd: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAccount:
    """The ledger of a job as its page shows it, and the verdict on the whole."""

    rows: tuple[AccountRow, ...] = ()
    """The costliest first; none where no price is known."""
    total: str = ""
    lost_usd: float | None = None
    """The dollars of what was lost to failures; None where no price is known."""
    duration: str = ""
    goodput: str = ""
    basis: str
    """What the dollars rest on."""
    estimate: str = ""
    """What was estimated, and how far the bill is from it; "" without an estimate."""
    notes: tuple[str, ...] = ()
    verdict: dict[str, Any] | None
    """The verdict on the whole training, as `describe_diagnosis` returns it; None while the job runs."""


def account_of(
    rundir: RunDir,
    nodes: Sequence[NodePresence],
    state: str,
    default_tier: Tier,
    training: Mapping[str, Any],
    now: float,
) -> JobAccount:
    """Return the account of a job in ``state``. It has no rows where the price of its nodes is not known."""
    running = state in (JobState.RUNNING, JobState.QUEUED)
    plan, launch = rundir.read_json(PLAN) or {}, rundir.read_json(LAUNCH) or {}
    events = [item for item in rundir.events() if item["kind"] != "node"]
    try:
        usage = launched_usage(nodes, launch, running, now, stale_seconds(rundir.storage))
        tracker = CostTracker("", [*usage, *probe_usage_of(plan)], plan.get("tier", default_tier))
    except (PriceError, ValueError):
        verdict = None if running else describe_diagnosis(diagnose(events), _advice(events, training))
        return JobAccount(basis="no price is known for its nodes", verdict=verdict)
    found = ledger(tracker.nodes, events, running, periods=1)
    causes = found.causes()
    digits = digits_of(found.units)
    rows = [
        AccountRow(
            cause=row["cause"],
            meaning=row["meaning"],
            duration=format_duration(float(row["node_seconds"])),
            share=float(row["percent"]) / 100,
            usd=f"${row['usd']:,}",
        )
        for row in ledger_rows(found, digits)
    ]
    judged = judge_job(events, found)
    verdict = None
    if not running:
        paid = describe_goodput(judged.goodput, state == JobState.SUCCEEDED)
        verdict = describe_diagnosis(judged.diagnosis, _advice(events, training), paid)
    return JobAccount(
        rows=tuple(sorted(rows, key=lambda row: -row.share)),
        lost_usd=causes[CostCause.LOST].usd if CostCause.LOST in causes else 0.0,
        total=f"${total_shown([found.units], digits):,}",
        duration=format_duration(found.microseconds / SECOND),
        goodput=f"{found.goodput:.0%} of the paid node-time was spent in steps that counted",
        basis=plan.get("price_words", price_words(str(launch.get("sku", "")), "history" in launch)),
        estimate=_estimate(plan, tracker, running),
        notes=(*tracker.notes, *found.notes),
        verdict=verdict,
    )


def describe_diagnosis(found: Diagnosis, advice: Sequence[str], of_paid_time: str = "") -> dict[str, Any] | None:
    """Return a diagnosis as the page shows it; None where the records do not tell. ``of_paid_time``: a sentence on what
    took the paid time, for a training that has ended."""
    if found.cause is SlowdownCause.UNKNOWN:
        return None
    share = f", {found.share:.0%} of training time" if found.share >= 0.005 else ""
    return {
        "cause": found.cause,
        "title": f"{found.where}{share}",
        "evidence": f"{found.evidence} {of_paid_time}".strip(),
        "also": [f"{item.where}, {item.share:.0%}: {item.evidence}" for item in found.also],
        "advice": list(advice),
    }


def _advice(events: Sequence[Mapping[str, Any]], training: Mapping[str, Any]) -> list[str]:
    return [describe_strategy(item) for item in best(strategies(settled(windows(events)), events, training))]


def _estimate(plan: Mapping[str, Any], tracker: CostTracker, running: bool) -> str:
    expected = ((plan.get("estimate") or {}).get("usd") or {}).get("expected")
    if not isinstance(expected, int | float) or isinstance(expected, bool) or expected <= 0:
        return ""
    words = f"estimated {dollars(expected)}"
    words += f", and {dollars(tracker.probe_usd)} for the probe" if tracker.probe_usd else ""
    spent = tracker.total_usd - tracker.probe_usd
    return words if running else f"{words}; the training cost {dollars(spent)}, {spent / expected - 1:+.0%}"

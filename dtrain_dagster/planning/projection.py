"""The cost of a running job so far and at its end, and the time left. Pure; dollars come from node presence, not from
a rate.

    at the end = so far + steps left x dollars per step
                        + dollars per second x (evaluations and checkpoints left + what is left of the finish)

Dollars per step are the median of the latest reports, each at the dollars per second that were paid just then: nodes
that are lost, replaced or added change the speed and the price together, and the hours between two launches are not
paid for. Before the first step it is the estimate, plus what the start has cost more than planned.

A projection *counts* once 5 % of the steps are done and three reports have come; an alarm requires besides
that two looks in a row agree (`sensors.cost_overrun`).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.costs.estimate import MINIMUM_MARGIN, Interval
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.jobs.view import JobView
from dtrain_dagster.support.formatting import format_duration

WAITING = JobView().phase
STARTING = "starting"

COUNTS_FROM_SHARE, COUNTS_FROM_REPORTS = 0.05, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLeft:
    """The time until a running job ends."""

    seconds: float
    has_finish: bool
    """Whether that is to the end of the job; else the finish, of unknown length, comes on top."""

    @property
    def words(self) -> str:
        """Return the time for a person: ``12 s``, or ``12 s to the last step``."""
        return format_duration(self.seconds) + ("" if self.has_finish else " to the last step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """The spent and projected dollars of one job."""

    so_far: float
    estimated: float | None = None
    """None for a job without a plan: then there is no end to project either."""
    at_end: Interval | None = None
    counts: bool = False
    """Whether enough is known for an alarm to rest on ``at_end``."""

    @property
    def over_so_far(self) -> float | None:
        """Return the cost so far above the estimate, as a fraction of it."""
        return self.so_far / self.estimated - 1 if self.estimated else None

    @property
    def over_at_end(self) -> float | None:
        """Return the projected cost above the estimate, as a fraction of it."""
        return self.at_end.expected / self.estimated - 1 if self.estimated and self.at_end else None


THRESHOLDS = (0.25, 0.5, 1.0)
"""The fractions above the estimate at which people are told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrun:
    """A job that costs more than was estimated, so far or, as projected, at its end."""

    kind: Literal["actual", "projected"]
    threshold: float
    """The highest threshold that is passed, as a fraction of the estimate."""
    fraction: float
    """Cost above the estimate, as a fraction of it."""
    covers: tuple[str, ...]
    """Keys of all alerts that this one makes unnecessary."""


def overruns(projection: Projection, told: Collection[str] = (), before: float | None = None) -> list[Overrun]:
    """Return the alerts that have not been sent: one for each threshold, or for the highest where several are passed at
    once; spent dollars are reported apart from projected ones, and cover a projection of as much. ``before``:
    `Projection.over_at_end` of the look before, without which a projection is not reported."""
    found, actual = [], projection.over_so_far
    if actual is not None and (passed := [level for level in THRESHOLDS if actual > level]):
        covers = tuple(_key(kind, level) for kind in ("actual", "projected") for level in passed)
        if _key("actual", passed[-1]) not in told:
            found.append(Overrun(kind="actual", threshold=passed[-1], fraction=actual, covers=covers))
        told = {*told, *covers}
    projected = projection.over_at_end if projection.counts else None
    if projected is not None and before is not None:
        passed = [level for level in THRESHOLDS if min(projected, before) > level]
        if passed and _key("projected", passed[-1]) not in told:
            covers = tuple(_key("projected", level) for level in passed)
            found.append(Overrun(kind="projected", threshold=passed[-1], fraction=projected, covers=covers))
    return found


def _key(kind: str, level: float) -> str:
    return f"{kind} {100 * level:g}%"


def project(tracker: CostTracker, plan: Mapping[str, Any] | None, view: JobView) -> Projection:
    """Return the projection. Raise KeyError, TypeError or ValueError for a damaged ``plan.json``."""
    if plan is None:
        return Projection(so_far=tracker.total_usd)
    usd = plan["estimate"]["usd"]
    estimate = Interval(**{name: float(usd.get(name, usd["expected"])) for name in ("low", "expected", "high")})
    if not estimate.expected > 0:
        raise ValueError(f"the plan's estimate is {estimate.expected} dollars")
    so_far, steps = tracker.total_usd, int((plan.get("work") or {}).get("steps") or 0)
    if not view.reports or not steps:
        at_end = _shifted(estimate, so_far, plan) if not view.step else None
        return Projection(so_far=so_far, estimated=estimate.expected, at_end=at_end)
    left = usd_left(tracker, view, plan)
    return Projection(
        so_far=so_far,
        estimated=estimate.expected,
        at_end=Interval(low=so_far + left.low, expected=so_far + left.expected, high=so_far + left.high),
        counts=view.step >= COUNTS_FROM_SHARE * steps and len(view.reports) >= COUNTS_FROM_REPORTS,
    )


def time_left(view: JobView, plan: Mapping[str, Any] | None, now: float) -> TimeLeft | None:
    """Return the time left of a job that runs, at Unix time ``now``: steps at their latest speed, evaluations and
    saves, and the finish as far as the plan foresees it. None where it is not known."""
    try:
        work, phases = (plan or {}).get("work") or {}, (plan or {}).get("phases") or {}
        finish, total = phases.get("finish"), work.get("steps") or view.total_steps
        if view.finish_began is not None:
            left = float(finish or 0.0) - max(0.0, now - view.finish_began)
            return TimeLeft(seconds=left, has_finish=True) if left > 0 else None
        if not view.reports or not total:
            return None
        steps = max(0.0, int(total) - view.step - _steps_since(now, view))
        pauses = sum(pauses_left(view, work, phases)) if work else view.paused_seconds * steps / max(1, view.step)
        seconds = steps * statistics.median(took for _, took, _ in view.reports) + pauses + float(finish or 0.0)
        return TimeLeft(seconds=seconds, has_finish=finish is not None)
    except (KeyError, TypeError, ValueError, AttributeError):  # a plan of another version
        return None


def usd_left(tracker: CostTracker, view: JobView, plan: Mapping[str, Any]) -> Interval:
    """Return the dollars still to be paid from now, which is the end of the last node's presence, to the end."""
    work, phases = plan["work"], plan.get("phases") or {}
    now = max((node.ended_at for node in tracker.nodes), default=view.reports[-1][0])
    rates = [_usd_per_second(tracker, at - max(1.0, seconds), at) for at, seconds, _ in view.reports]
    took = sorted(seconds * rate for (_, seconds, _), rate in zip(view.reports, rates, strict=True))
    finish = float(phases.get("finish") or 0.0)
    if view.finish_began is not None:
        finish = max(0.0, finish - max(0.0, now - view.finish_began))
    fixed = rates[-1] * (sum(pauses_left(view, work, phases)) + finish)
    steps = max(0.0, work["steps"] - view.step - _steps_since(now, view))
    if view.finish_began is not None:  # it may have stopped early
        fixed, steps = rates[-1] * finish, 0.0
    expected = fixed + steps * statistics.median(took)
    return Interval(
        low=min(fixed + steps * took[len(took) // 10], expected * (1 - MINIMUM_MARGIN)),
        expected=expected,
        high=max(fixed + steps * took[-1 - len(took) // 10], expected * (1 + MINIMUM_MARGIN)),
    )


def pauses_left(view: JobView, work: Mapping[str, Any], phases: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds of the evaluations and of the saves that are left: as measured, or else as planned."""
    share = max(0.0, 1 - view.step / work["steps"])

    def pause(measured: Sequence[float], name: str) -> float:
        if measured:
            return statistics.fmean(measured) * share * float(work.get(f"{name}s") or 0)
        return share * float(phases.get(name) or 0.0)

    return pause(view.evaluation_seconds, "evaluation"), pause(view.checkpoint_seconds, "checkpoint")


def _steps_since(now: float, view: JobView) -> float:
    """Return the steps done since the last report, as far as the view says; at most those between two reports."""
    if len(view.reports) < 2:
        return 0.0
    (_, _, before), (at, seconds, last) = view.reports[-2:]
    return min(max(0.0, now - at) / seconds, max(0.0, last - before))


def _shifted(estimate: Interval, so_far: float, plan: Mapping[str, Any]) -> Interval:
    """Return the estimate plus what the start has cost more than planned; at least what was spent."""
    seconds = float(((plan["estimate"].get("seconds") or {}).get("expected")) or 0.0)
    startup = (plan.get("phases") or {}).get("startup")
    planned = so_far if startup is None or not seconds else estimate.expected * float(startup) / seconds
    more = max(0.0, so_far - planned)
    return Interval(
        low=max(so_far, estimate.low + more),
        expected=max(so_far, estimate.expected + more),
        high=max(so_far, estimate.high + more),
    )


def _usd_per_second(tracker: CostTracker, first: float, last: float) -> float:
    """Return the dollars per second of this time; where nothing was paid, of the time from the beginning to now."""
    began = min((node.started_at for node in tracker.nodes), default=first)
    ended = max((node.ended_at for node in tracker.nodes), default=last)
    for begin, end in ((max(first, began), min(last, ended)), (began, ended)):
        paid = 0.0
        for node in tracker.nodes:
            within = min(node.ended_at, end) - max(node.started_at, begin)
            if within > 0:
                paid += node.usd * within / (node.ended_at - node.started_at)
        if paid > 0:
            return paid / (end - begin)
    return 0.0


def describe_training(
    view: JobView,
    total_steps: int | None,
    left: TimeLeft | None = None,
    state: JobState | None = None,
    with_share: bool = False,
) -> list[str]:
    """Return the parts of the line, as far as they are known. ``state``: of the job; one that has ended is told by its
    state, and has neither a speed nor nodes. ``with_share``: also which share of the steps is done."""
    ended = state is not None and state.is_final
    phase = STARTING if view.phase == WAITING and view.nodes_alive else view.phase
    parts = [str(state) if ended else phase]
    if view.step:
        share = f" ({view.step / total_steps:.0%})" if with_share and total_steps else ""
        parts.append(f"step {view.step}" + (f"/{total_steps}" if total_steps else "") + share)
        parts += [f"epoch {view.epoch}"] if view.epoch else []
    if left is not None and not ended:
        parts.append(f"ETA {left.words}")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.valid_loss is not None:
        parts.append(f"valid {view.valid_loss:.4f}")
    if view.samples_per_second is not None and not ended:
        parts.append(f"{view.samples_per_second:,.0f} samples/s")
    return parts


def count_nodes(count: int) -> str:
    return f"{count} node" + ("" if count == 1 else "s")

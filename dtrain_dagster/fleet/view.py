"""A fleet as people see it: each job's state, progress and dollars, and the nodes over time. It reads, and asks nobody.

The same view is printed by `dtrain fleet`, sent as JSON, and drawn by the dashboard.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtrain_dagster.clusters import presence
from dtrain_dagster.costs.budget import launch_price
from dtrain_dagster.costs.money import USD, usd
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.fleet.following import Followed
from dtrain_dagster.fleet.grants import Standing
from dtrain_dagster.fleet.jobs import FleetLimits, FleetState
from dtrain_dagster.fleet.outlook import Expected, expect
from dtrain_dagster.fleet.records import Entry, FleetRecords
from dtrain_dagster.fleet.scheduling import FleetFacts, why_waiting
from dtrain_dagster.fleet.waits import Wait
from trainer.documents.presences import stale_seconds
from trainer.errors import DamagedError
from trainer.rundir import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job of a fleet. Fields are None until they are known."""

    job_id: str
    state: str
    priority: int
    nodes: int
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    valid_loss: float | None = None
    seconds_left: float | None = None
    """Seconds to the end of its training, while it trains."""
    begins_in_seconds: float | None = None
    """Seconds until it is expected to be given nodes, of a job without."""
    ends_in_seconds: float | None = None
    """Seconds until it is expected to be over, with its wait."""
    becomes: str = ""
    """The state in which it is expected to end."""
    waits_for: str = ""
    """The limit that keeps a job without nodes from some, see `dtrain_dagster.fleet.waits.Limit`…"""
    waiting: str = ""
    """…and a sentence on it."""
    expected_end: str = ""
    """Why it is expected to be ended, or never begun."""
    usd: float = 0.0
    promised_usd: float = 0.0
    """What it may have cost when its nodes stop by themselves."""
    launches: int = 0
    reason: str = ""
    presence: Sequence[tuple[float, float]] = ()
    """From when to when each of its nodes was there; Unix seconds."""

    @property
    def why(self) -> str:
        """Return why the job is where it is, or not where one would have it, in a line."""
        parts = [f"waits for {self.waits_for}: {self.waiting}"] if self.waits_for else []
        parts += [f"expected to be ended: {self.expected_end}"] if self.expected_end else []
        return "; ".join(parts) or self.reason.partition("\n")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetView:
    """A fleet at one moment."""

    name: str
    at: float
    began_at: float
    budget_usd: float
    deadline: float | None
    nodes: int
    usd_per_node_hour: float
    is_run: bool
    """Whether an orchestrator is there."""
    is_cancelled: bool
    may_grow: bool
    """Whether its source may give more jobs, which nothing here knows of."""
    jobs: tuple[JobView, ...]

    @property
    def used_usd(self) -> float:
        """Return what all jobs have cost."""
        return sum(job.usd for job in self.jobs)

    @property
    def promised_usd(self) -> float:
        """Return what they may have cost when all nodes stop by themselves."""
        return sum(job.promised_usd for job in self.jobs)

    @property
    def busy_nodes(self) -> int:
        """Return the nodes that jobs have now."""
        return sum(job.nodes for job in self.jobs)

    @property
    def over(self) -> int:
        """Return how many jobs are over."""
        return sum(FleetState(job.state).is_final for job in self.jobs)

    @property
    def is_over(self) -> bool:
        """Return whether all jobs are over."""
        return self.over == len(self.jobs)

    def document(self) -> dict[str, Any]:
        """Return the view for JSON."""
        sums = {"used_usd": self.used_usd, "promised_usd": self.promised_usd, "ends_in_seconds": self.ends_in_seconds}
        jobs = [{**asdict(job), "why": job.why} for job in self.jobs]
        return {
            **asdict(self),
            "jobs": jobs,
            **sums,
            "busy_nodes": self.busy_nodes,
            "over": self.over,
            "left_out": self.left_out,
        }

    @property
    def ends_in_seconds(self) -> float | None:
        """Return the seconds until all jobs that are known now are expected to be over; None while that is not known of
        one of them."""
        ends = [job.ends_in_seconds for job in self.jobs if not FleetState(job.state).is_final]
        known = [seconds for seconds in ends if seconds is not None]
        return max(known) if known and len(known) == len(ends) else None

    @property
    def left_out(self) -> int:
        """Return how many of the jobs that are not over are expected to be ended, or never begun."""
        live = [job for job in self.jobs if not FleetState(job.state).is_final]
        return sum(job.becomes == FleetState.ENDED for job in live)


class FleetWatch:
    """Makes views of one fleet, again and again; what was read of a job is kept."""

    def __init__(self, records: FleetRecords) -> None:
        self.records = records
        self._followed: dict[str, Followed] = {}
        self._done: dict[str, JobView] = {}

    def view(self, now: float | None = None) -> FleetView:
        """Return the fleet as it is now. Raise `FleetError` where there is none of that name."""
        now = time.time() if now is None else now
        limits = self.records.limits()
        entries = self.records.entries()
        standings: dict[str, Standing] = {}
        jobs = [self._job(entry, limits, now, standings) for entry in entries]
        may_grow, is_cancelled = self.records.may_give_more(), self.records.is_cancelled()
        if standings and not is_cancelled:
            settled = sum(entry.kept.paid_units for entry in entries if entry.kept.state.is_final)
            facts = FleetFacts(
                limits=limits, jobs=tuple(standings.values()), settled_units=settled, more_may_come=may_grow
            )
            waits, ends = why_waiting(facts, now), expect(facts, now)
            jobs = [_with_outlook(job, ends.get(job.job_id), waits.get(job.job_id), now) for job in jobs]
        return FleetView(
            name=self.records.name,
            at=now,
            began_at=self.records.began_at(now),
            budget_usd=limits.budget_usd,
            deadline=limits.deadline,
            nodes=limits.nodes,
            usd_per_node_hour=limits.usd_per_node_hour,
            is_run=self.records.is_run(),
            is_cancelled=is_cancelled,
            may_grow=may_grow,
            jobs=tuple(jobs),
        )

    def _job(self, entry: Entry, limits: FleetLimits, now: float, standings: dict[str, Standing]) -> JobView:
        """Return a job without what is expected of it, and note in ``standings`` how it stands if it is not over."""
        job_id, kept = entry.job.job_id, entry.kept
        if job_id in self._done and self._done[job_id].state == kept.state:
            return self._done[job_id]
        view = JobView(
            job_id=job_id, state=kept.state, priority=entry.job.priority, nodes=kept.nodes, usd=usd(kept.paid_units),
            promised_usd=usd(kept.grant_units), launches=kept.launches, reason=kept.reason,
        )  # fmt: skip
        if kept.launches and entry.job.order is not None:
            view = self._told(entry, view, limits, now)
        if kept.state.is_final:
            self._done[job_id] = view
            return view
        standing = replace(
            entry.standing(), paid_units=max(kept.paid_units, min(kept.grant_units, round(view.usd * USD)))
        )
        followed = self._followed.get(job_id)
        standings[job_id] = followed.stands(standing, now) if followed and kept.state.has_nodes else standing
        return view

    def _told(self, entry: Entry, view: JobView, limits: FleetLimits, now: float) -> JobView:
        """Return the view of a job with what its run directory says."""
        job, kept = entry.job, entry.kept
        assert job.order is not None
        rundir = RunDir(job.order.job.run_dir)
        followed = self._followed.setdefault(job.job_id, Followed(rundir))
        try:
            followed.look()
            has_nodes = FleetState(view.state).has_nodes
            usage = presence.usage(rundir.nodes(), "", has_nodes, now, stale_seconds(rundir.storage))
            price = launch_price(rundir, "dedicated") or limits.usd_per_node_hour
        except (DamagedError, OSError) as error:
            return replace(view, reason=str(error))
        more_usd = max(0.0, _node_seconds(usage) - kept.node_seconds) * price / 3600
        progress, left = followed.view, followed.left(now) if has_nodes else None
        return replace(
            view,
            step=progress.step or None,
            total_steps=progress.total_steps,
            loss=progress.loss,
            valid_loss=progress.valid_loss,
            seconds_left=left.seconds if left else None,
            usd=view.usd + more_usd if has_nodes else view.usd,
            presence=tuple((item.started_at, item.ended_at) for item in usage),
        )


def _with_outlook(job: JobView, end: Expected | None, wait: Wait | None, now: float) -> JobView:
    """Return a job with what is expected of it, and why it waits."""
    if end is None:
        return job
    if wait is not None:
        job = replace(job, waits_for=str(wait.limit), waiting=wait.words)
    return replace(
        job,
        begins_in_seconds=None if end.begins_at is None else end.begins_at - now,
        ends_in_seconds=end.ends_at - now,
        becomes=str(end.state),
        expected_end=end.reason,
    )


def _node_seconds(usage: Sequence[NodeUsage]) -> float:
    return sum(max(0.0, item.ended_at - item.started_at) for item in usage)

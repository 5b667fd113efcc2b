"""A fleet as people see it: each job's state, progress and dollars, and the nodes over time. It reads, and asks nobody.

The same view is printed by `dtrain fleet`, sent as JSON, and drawn by the dashboard.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtrain_dagster.clusters import presence
from dtrain_dagster.costs.money import usd
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.fleet.following import Followed
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, FleetState
from dtrain_dagster.fleet.records import Entry, FleetRecords
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
    """Seconds to the end of its training, while it runs."""
    usd: float = 0.0
    promised_usd: float = 0.0
    """What it may have cost when its nodes stop by themselves."""
    launches: int = 0
    reason: str = ""
    presence: Sequence[tuple[float, float]] = ()
    """From when to when each of its nodes was there; Unix seconds."""


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
        sums = {"used_usd": self.used_usd, "promised_usd": self.promised_usd, "seconds_left": self.seconds_left}
        return {**asdict(self), **sums, "busy_nodes": self.busy_nodes, "over": self.over}

    @property
    def seconds_left(self) -> float | None:
        """Return about how long the jobs that run still take; None where none says."""
        return max((job.seconds_left for job in self.jobs if job.seconds_left is not None), default=None)


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
        return FleetView(
            name=self.records.name,
            at=now,
            began_at=self.records.began_at(now),
            budget_usd=limits.budget_usd,
            deadline=limits.deadline,
            nodes=limits.nodes,
            usd_per_node_hour=limits.usd_per_node_hour,
            is_run=self.records.is_run(),
            is_cancelled=self.records.is_cancelled(),
            jobs=tuple(self._job(entry, limits, now) for entry in self.records.entries()),
        )

    def _job(self, entry: Entry, limits: FleetLimits, now: float) -> JobView:
        job_id, kept = entry.job.job_id, entry.kept
        if job_id in self._done and self._done[job_id].state == kept.state:
            return self._done[job_id]
        view = JobView(
            job_id=job_id, state=kept.state, priority=entry.job.priority, nodes=kept.nodes, usd=usd(kept.paid_units),
            promised_usd=usd(kept.grant_units), launches=kept.launches, reason=kept.reason,
        )  # fmt: skip
        if kept.launches and entry.job.order is not None:
            view = self._told(entry.job, view, limits, now)
        if kept.state.is_final:
            self._done[job_id] = view
        return view

    def _told(self, job: FleetJob, view: JobView, limits: FleetLimits, now: float) -> JobView:
        """Return the view of a job with what its run directory says."""
        assert job.order is not None
        rundir = RunDir(job.order.job.run_dir)
        followed = self._followed.setdefault(job.job_id, Followed(rundir))
        try:
            followed.read()
            has_nodes = FleetState(view.state).has_nodes
            usage = presence.usage(rundir.nodes(), "", has_nodes, now, stale_seconds(rundir.storage))
        except (DamagedError, OSError) as error:
            return replace(view, reason=str(error))
        progress, left = followed.progress, followed.left(now) if has_nodes else None
        return replace(
            view,
            step=progress.step or None,
            total_steps=followed.pace.total_steps,
            loss=progress.loss,
            valid_loss=progress.valid_loss,
            seconds_left=left.seconds if left else None,
            usd=max(view.usd, usd(limits.units_of(_node_seconds(usage)))) if has_nodes else view.usd,
            presence=tuple((item.started_at, item.ended_at) for item in usage),
        )


def _node_seconds(usage: Sequence[NodeUsage]) -> float:
    return sum(max(0.0, item.ended_at - item.started_at) for item in usage)

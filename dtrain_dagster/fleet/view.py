"""A fleet as people see it: each job's state, progress and dollars. It reads, and asks nobody.

The same view is printed by `dtrain fleet` and sent as JSON.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtrain_dagster.clusters import presence
from dtrain_dagster.costs.money import USD, usd
from dtrain_dagster.costs.plan import launch_price
from dtrain_dagster.fleet.jobs import FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.runner import Followed
from dtrain_dagster.fleet.scheduling import FleetFacts, Look
from dtrain_dagster.planning.projection import time_left
from trainer.documents.presences import stale_seconds
from trainer.errors import DamagedError


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRow:
    """A job of a fleet. Fields are None until they are known."""

    job_id: str
    state: FleetState
    priority: int
    nodes: int
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    valid_loss: float | None = None
    seconds_left: float | None = None
    """Seconds to the end of its training; of a job with nodes while it trains."""
    usd: float = 0.0
    promised_usd: float = 0.0
    """What it may have cost when its nodes stop by themselves."""
    launches: int = 0
    why: str = ""
    """Why it is where it is, or not where one would have it."""


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
    ends_in_seconds: float | None
    """Seconds until all these jobs are over, if each takes what is expected of it; None while that is not known of one
    of them. A search may begin more."""
    jobs: tuple[FleetRow, ...]

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
        return sum(job.state.is_final for job in self.jobs)

    def document(self) -> dict[str, Any]:
        """Return the view for JSON."""
        sums = ("used_usd", "promised_usd", "busy_nodes", "over")
        return asdict(self) | {name: getattr(self, name) for name in sums}


class FleetWatch:
    """Makes views of one fleet, again and again; what was read of a job is kept."""

    def __init__(self, records: FleetRecords) -> None:
        self.records = records
        self._followers: dict[str, Followed] = {}
        self._done: dict[str, FleetRow] = {}

    def view(self, now: float | None = None) -> FleetView:
        """Return the fleet as it is now. Raise `FleetError` where there is none of that name."""
        now = time.time() if now is None else now
        limits, standings = self.records.limits(), self.records.standings()
        rows = [self._row(standing, limits, now) for standing in standings]
        told = [self._as_told(*item, now) for item in zip(standings, rows, strict=True)]
        waits = Look(FleetFacts(limits, tuple(told), more_may_come=True), now).waits
        rows = [replace(row, why=f"waits: {waits[row.job_id]}") if row.job_id in waits else row for row in rows]
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
            ends_in_seconds=_seconds_to_end(standings, rows, limits.nodes),
            jobs=tuple(rows),
        )

    def _as_told(self, standing: Standing, row: FleetRow, now: float) -> Standing:
        """Return how a job stands with what it has told and cost since that was noted: it is noted at its end."""
        follower = self._followers.get(standing.job_id)
        if follower is None or not standing.state.has_nodes:
            return standing
        return replace(follower.stands(standing, now), paid_units=max(standing.paid_units, round(row.usd * USD)))

    def _row(self, standing: Standing, limits: FleetLimits, now: float) -> FleetRow:
        job_id, state = standing.job_id, standing.state
        if job_id in self._done and self._done[job_id].state == state:
            return self._done[job_id]
        rests = not state.is_final and not state.has_nodes
        row = FleetRow(
            job_id=job_id,
            state=state,
            priority=standing.job.priority,
            nodes=standing.nodes,
            seconds_left=standing.seconds_left() if rests else None,
            usd=standing.usd,
            promised_usd=usd(standing.grant_units),
            launches=standing.launches,
            why=standing.reason.partition("\n")[0],
        )
        if standing.launches and standing.job.config is not None:
            row = self._told(standing, row, limits, now)
        if state.is_final:
            self._done[job_id] = row
        return row

    def _told(self, standing: Standing, row: FleetRow, limits: FleetLimits, now: float) -> FleetRow:
        """Return the row of a job with what its run directory says."""
        rundir = standing.job.rundir
        follower = self._followers.setdefault(standing.job_id, Followed(rundir))
        try:
            follower.look()
            told = follower.view
            row = replace(
                row, step=told.step or None, total_steps=told.total_steps, loss=told.loss, valid_loss=told.valid_loss
            )
            if standing.state.has_nodes:
                usage = presence.usage(rundir.nodes(), "", True, now, stale_seconds(rundir.storage))
                seconds = sum(max(0.0, item.ended_at - item.started_at) for item in usage) - standing.node_seconds
                price = launch_price(rundir, "dedicated") or limits.usd_per_node_hour
                left = time_left(told, None, now)
                more = max(0.0, seconds) * price / 3600
                row = replace(row, usd=row.usd + more, seconds_left=left.seconds if left else None)
        except (DamagedError, OSError) as error:
            return replace(row, why=str(error))
        return row


def _seconds_to_end(standings: list[Standing], rows: list[FleetRow], nodes: int) -> float | None:
    """Return the seconds until all are over, as if the nodes were always busy: at least what the longest takes."""
    each = [
        (standing.job.nodes, row.seconds_left)
        for standing, row in zip(standings, rows, strict=True)
        if not standing.state.is_final
    ]
    known = [(count, seconds) for count, seconds in each if seconds is not None]
    if not known or len(known) < len(each):
        return None
    return max(*(seconds for _, seconds in known), sum(count * seconds for count, seconds in known) / nodes)

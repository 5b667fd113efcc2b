"""A fleet as people see it: each job's state, progress and dollars. It reads, and asks nobody.

The same view is printed by `dtrain fleet` and sent as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain_dagster.clusters import presence
from dtrain_dagster.costs.money import USD, usd
from dtrain_dagster.costs.plan import launch_price
from dtrain_dagster.fleet.jobs import FleetLimits, FleetState, Standing
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.scheduling import Look
from dtrain_dagster.jobs.view import JobFollower, JobView
from dtrain_dagster.planning.projection import COUNTS_FROM_REPORTS, time_left
from trainer.documents.events import EvaluationEvent, read_events
from trainer.documents.presences import stale_seconds
from trainer.errors import DamagedError
from trainer.rundir import RunDir


class Followed(JobFollower):
    """A job as far as its events were read."""

    def __init__(self, rundir: RunDir) -> None:
        super().__init__(rundir)
        self.judged: dict[int, EvaluationEvent] = {}
        """The evaluations of the validation split by step; of a step that was done again, the last."""

    def look(self) -> None:
        """Read what has come since."""
        for events in self.read():
            for event in read_events(EvaluationEvent, events):
                if event.split == "valid" and event.step is not None:
                    self.judged[event.step] = event

    @property
    def evaluations(self) -> Sequence[EvaluationEvent]:
        """Return the evaluations in order of steps."""
        return tuple(self.judged[step] for step in sorted(self.judged))

    def stands(self, standing: Standing, now: float) -> Standing:
        """Return how the job stands, with what it has told since it was given its nodes last. The first report, with
        a step many times as long as others, is not believed: what is promised is not taken back before the end."""
        reports, launched_at = self.view.reports, standing.launched_at
        if not reports or launched_at is None or reports[-1][0] < launched_at:
            return standing
        left = time_left(self.view, None, now) if len(reports) >= COUNTS_FROM_REPORTS else None
        if self.view.finish_began is not None:
            standing = replace(standing, left_node_seconds=0.0)
        elif left is not None:
            standing = replace(standing, left_node_seconds=left.seconds * standing.job.nodes)
        return replace(standing, is_training=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRow:
    """A job of a fleet. Fields are None until they are known."""

    job_id: str
    state: FleetState
    priority: int
    nodes: int
    step: int | None
    total_steps: int | None
    loss: float | None
    valid_loss: float | None
    seconds_left: float | None
    """Seconds to the end of its training; of a job with nodes while it trains."""
    usd: float
    promised_usd: float
    """What it may have cost when its nodes stop by themselves."""
    launches: int
    why: str
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
    used_usd: float
    """What all jobs have cost."""
    promised_usd: float
    """What they may have cost when all nodes stop by themselves."""
    busy_nodes: int
    over: int
    """How many jobs are over."""


class FleetWatch:
    """Makes views of one fleet, again and again; what was read of a job is kept."""

    def __init__(self, records: FleetRecords) -> None:
        self.records = records
        self._followers: dict[str, Followed] = {}
        self._done: dict[str, FleetRow] = {}

    def view(self, now: float | None = None) -> FleetView:
        """Return the fleet as it is now. Raise `FleetError` where there is none of that name."""
        now = time.time() if now is None else now
        limits, noted = self.records.limits(), self.records.standings()
        standings, rows = zip(*(self._look_at(item, limits, now) for item in noted), strict=True) if noted else ((), ())
        waits = Look(limits, standings, now, more_may_come=True).waits
        rows = tuple(replace(row, why=f"waits: {waits[row.job_id]}") if row.job_id in waits else row for row in rows)
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
            jobs=rows,
            used_usd=sum(row.usd for row in rows),
            promised_usd=sum(row.promised_usd for row in rows),
            busy_nodes=sum(row.nodes for row in rows),
            over=sum(row.state.is_final for row in rows),
        )

    def _look_at(self, standing: Standing, limits: FleetLimits, now: float) -> tuple[Standing, FleetRow]:
        """Return how a job stands, with what it has told and cost since that was noted, and its row."""
        job_id, state, why, told = standing.job_id, standing.state, standing.reason.partition("\n")[0], JobView()
        if job_id in self._done and self._done[job_id].state == state:
            return standing, self._done[job_id]
        if standing.launches and standing.job.config is not None:
            follower = self._followers.setdefault(job_id, Followed(standing.job.rundir))
            try:
                follower.look()
                told = follower.view
                if state.has_nodes:
                    standing = replace(
                        follower.stands(standing, now),
                        paid_units=standing.paid_units + unnoted_units(standing, limits, now),
                    )
            except (DamagedError, OSError) as error:
                why = str(error)
        trains = standing.is_training and told.finish_began is None  # nobody knows how long its finish takes
        is_known = not state.is_final and (trains or not state.has_nodes)
        row = FleetRow(
            job_id=job_id,
            state=state,
            priority=standing.job.priority,
            nodes=standing.nodes,
            step=told.step or None,
            total_steps=told.total_steps,
            loss=told.loss,
            valid_loss=told.valid_loss,
            seconds_left=standing.seconds_left() if is_known else None,
            usd=standing.usd,
            promised_usd=usd(standing.grant_units),
            launches=standing.launches,
            why=why,
        )
        if state.is_final:
            self._done[job_id] = row
        return standing, row


def unnoted_units(standing: Standing, limits: FleetLimits, now: float) -> int:
    """Return what the nodes of a job have cost since its bill was noted. Raise as its run directory does."""
    rundir = standing.job.rundir
    usage = presence.usage(rundir.nodes(), "", True, now, stale_seconds(rundir.storage))
    seconds = sum(max(0.0, item.ended_at - item.started_at) for item in usage) - standing.node_seconds
    price = launch_price(rundir, "dedicated") or limits.usd_per_node_hour
    return round(max(0.0, seconds) * price / 3600 * USD)


def _seconds_to_end(standings: Sequence[Standing], rows: Sequence[FleetRow], nodes: int) -> float | None:
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

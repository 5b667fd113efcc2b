"""The facts on a job that commands list and show: its state, and what all of its launches took and cost.

What is printed here and by ``--json`` is the same. `dtrain_dagster.cli.terminal` shows how a job goes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dtrain_dagster.cli.common import run_dir
from dtrain_dagster.clusters import presence
from dtrain_dagster.clusters.base import JobStatus
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.jobs.totals import LaunchTotals, sum_launches
from dtrain_dagster.jobs.view import last_step
from dtrain_dagster.settings.tiers import tier_of
from trainer.documents.presences import stale_seconds
from trainer.errors import DamagedError
from trainer.rundir import LAUNCH, RunDir

if TYPE_CHECKING:
    from dtrain_dagster.settings.environment import Settings

DAMAGED = "damaged"
"""The state of a job whose run directory cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """A job as the list of all jobs has it."""

    status: JobStatus
    run_dir: str
    nodes: int = 0
    """Nodes of its last launch."""
    began_at: float | None = None
    """The start of its first launch; Unix seconds."""
    totals: LaunchTotals | None = None
    """Over all launches; None where that is not recorded."""
    step: tuple[int, float] | None = None
    """The last step and its loss."""

    @property
    def state(self) -> str:
        """Return the state in a word."""
        return DAMAGED if self.status.damage else self.status.state.value

    @property
    def seconds(self) -> float | None:
        """Return for how many seconds at least one node was there; where nobody recorded it, the time from start to
        end."""
        if self.totals is not None and self.totals.launches:
            return self.totals.seconds
        if self.status.started_at is None:
            return None
        return max(0.0, (self.status.ended_at or time.time()) - self.status.started_at)

    @property
    def usd(self) -> float | None:
        """Return the dollars of its own nodes; None where no price is known."""
        return self.totals.usd if self.totals is not None else None

    def document(self) -> dict[str, Any]:
        """Return the facts for JSON, with the fields of `dtrain_dagster.cli.json_fields.JOB`."""
        status, totals = self.status, self.totals
        return {
            "job": status.job_id,
            "state": self.state,
            "message": status.damage or status.message,
            "nodes": self.nodes,
            "nodes_alive": status.nodes_alive,
            "launches": totals.launches if totals else 0,
            "started_at": self.began_at,
            "ended_at": status.ended_at if status.state.is_final else None,
            "seconds": self.seconds,
            "node_hours": totals.node_hours if totals else None,
            "usd": self.usd,
            "step": self.step[0] if self.step else None,
            "loss": self.step[1] if self.step else None,
            "run_dir": self.run_dir,
        }


def read_facts(settings: Settings, status: JobStatus) -> JobFacts:
    """Return the facts on a job of this status. One that is damaged, or cannot be read now, hides no other."""
    rundir = run_dir(settings, status.job_id)
    try:
        if status.damage:
            return JobFacts(status=status, run_dir=rundir.uri)
        launch, nodes = rundir.read_json(LAUNCH) or {}, rundir.nodes()
        return JobFacts(
            status=status,
            run_dir=rundir.uri,
            nodes=launch.get("node_count", 0),
            began_at=min((node.started_at for node in nodes), default=status.started_at),
            totals=read_totals(settings, rundir, launch, not status.state.is_final),
            step=last_step(rundir),
        )
    except (DamagedError, OSError) as error:
        return JobFacts(status=replace(status, damage=str(error)), run_dir=rundir.uri)


def read_totals(settings: Settings, rundir: RunDir, launch: Mapping[str, Any], running: bool) -> LaunchTotals:
    """Return the time and the dollars of a job's own nodes, over all launches. ``launch``: the content of
    ``launch.json``."""
    plan = rundir.read_json(PLAN) or {}
    sku, tier = launch.get("sku") or settings.gpu_type, launch.get("tier") or plan.get("tier") or settings.tiers[0]
    usage = presence.usage(rundir.nodes(), sku, running, time.time(), stale_seconds(rundir.storage))
    return sum_launches(usage, tier_of(tier))


def list_facts(settings: Settings, statuses: Sequence[JobStatus], readers: int) -> list[JobFacts]:
    """Return the facts on these jobs, which this many threads read."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(readers) as pool:
        return list(pool.map(lambda status: read_facts(settings, status), statuses))

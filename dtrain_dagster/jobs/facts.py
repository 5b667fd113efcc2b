"""How a job stands, from its run directory: its state, what all of its launches took and cost, and how far it has come.
The commands, the list of the dashboard and ``--json`` say the same of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.clusters import presence
from dtrain_dagster.clusters.base import JobState, JobStatus
from dtrain_dagster.clusters.notices import describe_kept
from dtrain_dagster.costs.plan import PLAN
from dtrain_dagster.jobs.totals import LaunchTotals, launched_usage, sum_launches
from dtrain_dagster.jobs.view import last_step
from dtrain_dagster.settings.cluster_kinds import Tier, tier_of
from dtrain_dagster.support.job_lock import is_held
from trainer.documents.presences import stale_seconds
from trainer.printable import visible
from trainer.rundir import JOB, LAUNCH, RESULT, STATUS, RunDir
from trainer.secrets.redaction import redact

DAMAGED = "damaged"
"""The state, in place of a `JobState`, of a job whose run directory cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """A job as lists have it. Times are Unix seconds."""

    status: JobStatus
    run_dir: str = ""
    model: str = ""
    nodes: int = 0
    """Nodes of its last launch."""
    began_at: float | None = None
    """The start of its first launch."""
    totals: LaunchTotals | None = None
    """Over all launches, without its probes, which are jobs of their own; None where that is not recorded."""
    step: int | None = None
    loss: float | None = None
    words: str = ""
    """On the dashboard: why it waits, or how it ended."""

    @property
    def job_id(self) -> str:
        """Return its name."""
        return self.status.job_id

    @property
    def state(self) -> str:
        """Return the state in a word."""
        return DAMAGED if self.status.damage else self.status.state.value

    @property
    def running(self) -> bool:
        """Return whether the job is neither ended nor damaged."""
        return not (self.status.damage or self.status.state.is_final)

    @property
    def ended_at(self) -> float | None:
        """Return when it ended; None while it runs."""
        return self.status.ended_at if self.status.state.is_final else None

    @property
    def seconds(self) -> float | None:
        """Return for how many seconds at least one node was there; where nobody recorded it, the time from start to
        end; None where neither is known."""
        if self.totals is not None and self.totals.launches:
            return self.totals.seconds
        ended_at = self.status.ended_at if self.status.state.is_final else time.time()
        if self.status.started_at is None or ended_at is None:
            return None
        return max(0.0, ended_at - self.status.started_at)

    @property
    def usd(self) -> float | None:
        """Return the dollars of its own nodes; None where no price is known."""
        return self.totals.usd if self.totals is not None else None

    def document(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        status, totals = self.status, self.totals
        return {
            "job": status.job_id,
            "state": self.state,
            "message": status.damage or status.message,
            "kept": list(status.kept),
            "nodes": self.nodes,
            "nodes_alive": status.nodes_alive,
            "launches": totals.launches if totals else 0,
            "started_at": self.began_at,
            "ended_at": self.ended_at,
            "seconds": self.seconds,
            "node_hours": totals.node_hours if totals else None,
            "usd": self.usd,
            "step": self.step,
            "loss": self.loss,
            "run_dir": self.run_dir,
        }


def read_facts(rundir: RunDir, status: JobStatus, tier: Tier, sku: str = "") -> JobFacts:
    """Return the facts on a job of this status. ``tier``, ``sku``: of launches that do not say theirs. Raise
    `DamagedError`, OSError or ValueError where its files cannot be read."""
    return add_paid(read_course(rundir, status), rundir, tier, sku)


def read_course(rundir: RunDir, status: JobStatus) -> JobFacts:
    """Return the facts on a job of this status that need neither its plan nor the presence of its nodes."""
    step, loss = last_step(rundir) or (None, None)
    if status.state.is_final:  # not each step is reported
        kept = None if status.state is JobState.SUCCEEDED else rundir.latest_checkpoint()
        known = (step, (rundir.read_json(RESULT) or {}).get("steps"), kept and kept[1])
        step = max((each for each in known if isinstance(each, int)), default=None)
    model = str(((rundir.read_json(JOB) or {}).get("model") or {}).get("factory", ""))
    return JobFacts(
        status=status,
        run_dir=rundir.uri,
        model=visible(redact(model)),  # nodes may have written it
        began_at=status.started_at,
        step=step,
        loss=loss,
    )


def add_paid(facts: JobFacts, rundir: RunDir, tier: Tier, sku: str = "") -> JobFacts:
    """Return the facts with what the presence of nodes tells: when the job began, what it took and cost."""
    launch, plan, nodes = rundir.read_json(LAUNCH) or {}, rundir.read_json(PLAN) or {}, rundir.nodes()
    running = not facts.status.state.is_final
    usage = launched_usage(nodes, launch, running, time.time(), stale_seconds(rundir.storage), sku)
    return replace(
        facts,
        nodes=launch.get("node_count", 0),
        began_at=min((node.started_at for node in nodes), default=facts.began_at),
        totals=sum_launches(usage, tier_of(plan.get("tier") or tier)),
    )


def status_here(rundir: RunDir) -> JobStatus:
    """Return the status of a training as its run directory alone tells it, wherever and by whom it was started. Raise
    FileNotFoundError where it is none, ValueError or as `RunDir` does where it is damaged."""
    if rundir.read_json(JOB) is None:
        raise FileNotFoundError(f"{rundir.uri}/{JOB}")
    launch, here = rundir.read_json(LAUNCH), False
    status = rundir.read_json(STATUS) or {}
    if launch and rundir.storage.is_local and not _is_over(status):
        here = is_held(rundir.storage.local_path())  # then it is its supervisor that says how it ends
        # Read again after the lock was looked at: an end recorded in between is no death.
        status = rundir.read_json(STATUS) or {}
        if not here and not _is_over(status):
            status = {**status, "state": JobState.FAILED, "ended_at": status.get("ended_at")}
    state = state_of(status, {} if here else rundir.read_json(RESULT) or {}, launch)
    ended_at = status.get("ended_at")
    if ended_at is None and state.is_final:  # no process was left to record it
        ended_at = max(map(presence.end_of, rundir.nodes()), default=None)
    started_at = status.get("started_at") or (launch or {}).get("submitted_at") or rundir.first_event_at()
    return JobStatus(
        job_id=rundir.uri.rstrip("/").rpartition("/")[2],
        state=state,
        message=str(status.get("message") or ""),
        kept=tuple(describe_kept(status.get("kept") or ())),
        started_at=started_at,
        ended_at=ended_at,
    )


def state_of(status: Mapping[str, Any], result: Mapping[str, Any], launch: Mapping[str, Any] | None) -> JobState:
    """Return the job's state. Pure.

    The cluster's record counts where it says that the job has ended; else the trainer's record of its end counts: there
    may be no cluster any more, or no process that looks after the job.
    """
    said = JobState(status.get("state", JobState.RUNNING if launch is None else JobState.QUEUED))
    # A result of an earlier launch tells nothing about this one; trainers that do not regroup know of no launches.
    counts = launch is None or result.get("launch") in (None, launch.get("launch"))
    with suppress(ValueError):  # "stopped": the trainer was asked to, and its cluster says why
        ended = JobState.FAILED if result.get("status") == "budget" else JobState(result.get("status", said))
        return ended if not said.is_final and ended.is_final and counts else said
    return said


def _is_over(status: Mapping[str, Any]) -> bool:
    return JobState(status.get("state", JobState.QUEUED)).is_final

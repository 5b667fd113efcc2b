"""``status.json`` of a job on Azure ML: its content, when it is worth writing, and how a `JobStatus` is read from it.

Decisions about a job, and their execution, belong in the controller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.azure_ml.client import ServiceError
from dtrain_dagster.clusters.azure_ml.launch_record import Record
from dtrain_dagster.clusters.azure_ml.states import JobDecision, JobFacts, phase_of
from dtrain_dagster.clusters.base import JobState, JobStatus, Starved
from dtrain_dagster.clusters.presence import is_here
from trainer.documents.presences import stale_seconds
from trainer.rundir import STATUS, RunDir

_log = logging.getLogger(__name__)


class StatusFile:
    """The status of the job in one run directory. With ``writes_reports=False`` only its end is written."""

    def __init__(self, rundir: RunDir, writes_reports: bool = True) -> None:
        self.rundir, self.writes_reports = rundir, writes_reports
        self.stale = stale_seconds(rundir.storage)

    def read(self) -> dict[str, Any]:
        """Return the document, an empty one if there is none yet."""
        return self.rundir.read_json(STATUS) or {}

    def is_final(self, record: Mapping[str, Any], status: Mapping[str, Any] | None = None) -> bool:
        """Return whether this launch has ended. ``status``: the document, where it has been read already."""
        status = self.read() if status is None else status
        return status.get("launch") == record.get("launch", 0) and JobState(status["state"]).is_final

    def report(self, record: Record, facts: JobFacts, decision: JobDecision, write: bool = True) -> JobStatus:
        """Return the job's status now; it is written where anything but its words has changed."""
        status = describe_status(record, facts, decision)
        if write and self.writes_reports:
            known = self.read()
            if known | {"message": ""} != status | {"message": ""}:  # words alone, such as how long, are not worth it
                self.rundir.write_json(STATUS, status)
        return job_status_of(status, self._count_alive(facts.now))

    def report_unreachable(self, record: Record, status: Mapping[str, Any], error: ServiceError) -> JobStatus:
        """Return the last seen status, with the time since when the job could not be seen."""
        known = dict(status) if status.get("launch") == record["launch"] else {}
        since = known.get("unreachable_since") or time.time()
        if self.writes_reports and known and not known.get("unreachable_since"):
            self.rundir.write_json(STATUS, {**known, "unreachable_since": since})
        return self._repeat(record, known, f"has been unreachable for {time.time() - since:.0f} s: {error}")

    def report_missing(self, record: Record, status: Mapping[str, Any], message: str) -> JobStatus:
        """Return the last seen status of a job that the service says not to know, with this message. It goes on from
        there if it is found again, so nothing is written."""
        return self._repeat(record, status if status.get("launch") == record["launch"] else {}, message)

    def _repeat(self, record: Record, known: Mapping[str, Any], message: str) -> JobStatus:
        _log.warning("job %s: %s", record["job_name"], message)
        return JobStatus(
            job_id=record["job_id"],
            state=JobState(known.get("state", JobState.QUEUED)),
            message=message,
            nodes_alive=self._count_alive(time.time()),
            started_at=record["first_submitted_at"],
        )

    def write_end(
        self, record: Record, facts: JobFacts, decision: JobDecision, ended_at: float, exit_code: int,
        starved: Starved | None = None,
    ) -> JobStatus:  # fmt: skip
        """Write how this launch ended, for any caller that looks, and return the status."""
        status = describe_status(record, facts, decision) | {"ended_at": ended_at, "exit_code": exit_code}
        status |= {"starved": asdict(starved)} if starved else {}
        self.rundir.write_json(STATUS, status)
        return job_status_of(status)

    def _count_alive(self, now: float) -> int:
        return sum(is_here(node, now, self.stale) for node in presences.find_latest_presences(self.rundir.nodes(True)))


def describe_status(record: Record, facts: JobFacts, decision: JobDecision) -> dict[str, Any]:
    """Return the document for a launch that has not ended. Pure."""
    return {
        "job_id": record["job_id"],
        "state": decision.state,
        "message": decision.message,
        "launch": record["launch"],
        "service_status": facts.look.status,
        "phase": phase_of(facts.look),
        "phase_since": facts.phase_since,
        "started_at": record["first_submitted_at"],
        "ended_at": None,
        "exit_code": None,
        "studio_url": record["studio_url"],
        "unreachable_since": None,
    }


def job_status_of(status: Mapping[str, Any], nodes_alive: int = 0) -> JobStatus:
    """Return the status that the document holds. Pure."""
    return JobStatus(
        job_id=status["job_id"],
        state=JobState(status["state"]),
        message=status["message"],
        nodes_alive=nodes_alive,
        started_at=status["started_at"],
        ended_at=status["ended_at"],
        starved=Starved(**status["starved"]) if status.get("starved") else None,
    )

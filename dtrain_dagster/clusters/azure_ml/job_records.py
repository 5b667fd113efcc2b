"""What a job of Azure ML is, and the records that the orchestrator adds to its run directory: ``status.json`` and ends
of nodes. Decisions about a job, and their execution, belong in the controller.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.azure_ml import launch_record as launch_records
from dtrain_dagster.clusters.azure_ml.client import NotFound, ServiceError
from dtrain_dagster.clusters.azure_ml.jobs import JOB_TAG, LAUNCH_TAG, RUN_DIR_TAG, RUN_TAG, Jobs
from dtrain_dagster.clusters.azure_ml.launch_record import Record, job_name, launch_durations
from dtrain_dagster.clusters.azure_ml.provision import NODES_THERE, Provisioner
from dtrain_dagster.clusters.azure_ml.sku_chain import SkuChoice, chain
from dtrain_dagster.clusters.azure_ml.states import JobDecision, JobFacts, ServiceJob, phase_of
from dtrain_dagster.clusters.base import OWNER, JobState, JobStatus, Orphan, Starved
from dtrain_dagster.clusters.exit_policy import is_failure
from dtrain_dagster.costs.usage import NodeUsage
from trainer.documents.presences import stale_seconds
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.rundir import RESULT, STATUS, RunDir


def gather_facts(
    record: Record, job: ServiceJob | None, status: Mapping[str, Any], rundir: RunDir, provisioner: Provisioner
) -> JobFacts:
    """Return the facts about a launch now. ``status``: ``status.json``. Raise `ServiceError` where the service does not
    say what nodes it has for a job that waits."""
    now, options = time.time(), provisioner.options
    job = job or ServiceJob(status="")
    phase = phase_of(job)
    nodes = [node for node in rundir.nodes() if node.launch == record["launch"]]
    latest = presences.find_latest_presences(nodes)
    since = record["submitted_at"]
    if status.get("launch") == record["launch"] and phase != "gone":
        since = status["phase_since"] if status.get("phase") == phase else now
    ready, error = None, ""
    if phase == "waiting":
        patience = options.look_patience_seconds
        there = provisioner.nodes(record["compute"], patience)
        ready = sum(state in NODES_THERE and job_name in (None, "") for _, state, job_name in there)
        if ready < record["node_count"]:
            error = provisioner.allocation_error(record["compute"], patience)
    here = SkuChoice(sku=record["sku"], tier=record["tier"])
    others = chain(record["sku"], options.chain, options.tiers, {here, *launch_records.excluded(record)})
    return JobFacts(
        record=record,
        job=job,
        now=now,
        phase_since=since,
        result=rundir.read_json(RESULT),
        heard_at=max((node.last_seen_at or node.started_at for node in nodes), default=None),
        vanished=tuple(node.node_id for node in latest if node.ended_at is None),
        exit_codes=tuple(code for node in latest for code in node.exit_codes),
        resubmissions_left=options.max_resubmissions - (record["launch"] - record["first_launch"]),
        nodes_ready=ready,
        allocation_error=error,
        has_alternative=bool(others),
    )


LOG_TAIL_LINES = 12
SLACK_SECONDS = 300.0
"""Seconds that a node's record may have beyond the time between the order of its launch and its end, as seen from
here."""
_log = logging.getLogger(__name__)


class JobRecords:
    """The orchestrator's records in one run directory. With ``writes_reports=False`` only the end of a job is written
    to its status."""

    def __init__(self, rundir: RunDir, jobs: Jobs, writes_reports: bool = True) -> None:
        self.rundir, self.jobs, self.writes_reports = rundir, jobs, writes_reports
        self.stale = stale_seconds(rundir.storage)

    def read_status(self) -> dict[str, Any]:
        """Return the document, an empty one if there is none yet."""
        return self.rundir.read_json(STATUS) or {}

    def is_final(self, record: Mapping[str, Any], status: Mapping[str, Any] | None = None) -> bool:
        """Return whether this launch has ended. ``status``: the document, where it has been read already."""
        status = self.read_status() if status is None else status
        return status.get("launch") == record.get("launch", 0) and JobState(status["state"]).is_final

    def report(self, facts: JobFacts, decision: JobDecision, write: bool = True) -> JobStatus:
        """Return the job's status now; it is written where anything but its words has changed."""
        status = describe_status(facts, decision)
        if write and self.writes_reports:
            known = self.read_status()
            if known | {"message": ""} != status | {"message": ""}:  # words alone, such as how long, are not worth it
                self.rundir.write_json(STATUS, status)
        return job_status_of(status, self._count_alive(facts.now))

    def report_unreachable(self, record: Record, error: ServiceError) -> JobStatus:
        """Return the last seen status, with the time since when the job could not be seen."""
        known, now = self.read_status(), time.time()
        since = known.get("unreachable_since") or now
        if self.writes_reports and known.get("launch") == record["launch"] and not known.get("unreachable_since"):
            self.rundir.write_json(STATUS, {**known, "unreachable_since": since})
        return self.repeat(record, f"has been unreachable for {now - since:.0f} s: {error}")

    def repeat(self, record: Record, message: str) -> JobStatus:
        """Return the last seen status with this message, such as that the service does not know the job. It goes on
        from there if it is found again, so nothing is written."""
        known = self.read_status()
        _log.warning("job %s: %s", record["job_name"], message)
        return JobStatus(
            job_id=record["job_id"],
            state=JobState(known["state"] if known.get("launch") == record["launch"] else JobState.QUEUED),
            message=message,
            nodes_alive=self._count_alive(time.time()),
            started_at=record["first_submitted_at"],
        )

    def write_end(
        self,
        facts: JobFacts,
        decision: JobDecision,
        ended_at: float,
        exit_code: int,
        starved: Starved | None = None,
    ) -> JobStatus:
        """Write how this launch ended, for any caller that looks, and return the status."""
        status = describe_status(facts, decision) | {"ended_at": ended_at, "exit_code": exit_code}
        status |= {"starved": asdict(starved)} if starved else {}
        self.rundir.write_json(STATUS, status)
        return job_status_of(status)

    def _count_alive(self, now: float) -> int:
        return sum(
            presences.is_here(node, now, self.stale)
            for node in presences.find_latest_presences(self.rundir.nodes(True))
        )

    def usage(self, record: Record, running: bool, now: float) -> list[NodeUsage]:
        """Return every presence of a node as paid time, with the SKU and tier that were really bought."""
        given = {item["launch"]: item for item in [*record["history"], record]}
        lasted, found = launch_durations(record, now), []
        for paid in presences.usage(self.rundir.nodes(), "", running, now, self.stale):
            # A node keeps its own record: it cannot have been there for longer than its launch.
            most = lasted.get(paid.launch, math.inf) + SLACK_SECONDS
            excess = max(0.0, paid.ended_at - paid.started_at - most)
            kind = given.get(paid.launch, record)
            ended_at, not_billed = paid.ended_at - excess, excess or paid.not_billed_seconds
            bought = {"sku": kind["sku"], "tier": kind["tier"]}
            found.append(replace(paid, **bought, ended_at=ended_at, not_billed_seconds=not_billed))
        return found

    def end_stays(self, ended_at: float | None) -> None:
        """Write the end of nodes that could not: a node heard of shortly before the job ended was present until then, a
        silent one until it was last heard of."""
        end = min(ended_at or time.time(), time.time())
        for node in self.rundir.nodes(skip_damaged=True):
            if node.ended_at is None:
                seen = presences.end_of(node)
                self.rundir.write_node(replace(node, ended_at=end if 0 <= end - seen < self.stale else seen))

    def logs(self, record: Record) -> dict[int, str]:
        """Return the output of all launches, by node, from the service. Raise `ServiceError` if it cannot be read."""
        found: dict[int, str] = {}
        for launch in [*record["history"], record]:
            for node_id, text in self._logs_of(launch["job_name"], record["processes_per_node"]).items():
                header = f"--- launch {launch['launch']}, {launch['job_name']} ---"
                found[node_id] = f"{found.get(node_id, '')}{header}\n{text}"
        return dict(sorted(found.items()))

    def _logs_of(self, job_name: str, processes_per_node: int) -> dict[int, str]:
        try:
            return by_node(self.jobs.logs(job_name, self.jobs.options.look_patience_seconds), processes_per_node)
        except NotFound:  # it was never submitted, or somebody has deleted it
            return {}

    def said(self, record: Record) -> str:
        """Return the end of the log that most likely says why a launch failed, for its message; "" where there is none,
        or the service does not answer."""
        texts: dict[int, str] = {}
        with contextlib.suppress(ServiceError, OSError):
            texts = self._logs_of(record["job_name"], record["processes_per_node"])
        failed = [node.node_id for node in self.rundir.nodes(True) if any(map(is_failure, node.exit_codes))]
        node_id = next((node_id for node_id in [*failed, *texts] if _has_words(texts.get(node_id, ""))), None)
        if node_id is None:
            return ""
        end = "\n".join(texts[node_id].splitlines()[-LOG_TAIL_LINES:])
        return f"; the end of the log of node {node_id}:\n{end}"


def _has_words(text: str) -> bool:
    """Return whether a log has more than headers. A rank that was killed because another one failed may have printed
    nothing."""
    return any(line and not line.startswith("--- ") for line in text.splitlines())


def by_node(texts: Mapping[int, str], processes_per_node: int) -> dict[int, str]:
    """Return node → the output of its ranks, one after the other; several ranks each under a line that names it.
    Pure."""
    found: dict[int, str] = {}
    for rank, text in sorted(texts.items()):
        header = f"--- rank {rank} ---\n" if processes_per_node > 1 else ""
        node_id = rank // processes_per_node
        found[node_id] = found.get(node_id, "") + header + text.rstrip("\n") + "\n"
    return found


def describe_status(facts: JobFacts, decision: JobDecision) -> dict[str, Any]:
    """Return the document for a launch that has not ended. Pure."""
    record = facts.record
    return {
        "job_id": record["job_id"],
        "state": decision.state,
        "message": decision.message,
        "launch": record["launch"],
        "phase": phase_of(facts.job),
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


def why_orphaned(
    name: str, record: Mapping[str, Any] | None, is_settled: bool, owner: str | None, live_runs: Collection[str]
) -> str:
    """Return why a job that runs in the service has no owner; "" if it has one. Pure.

    ``record``: ``launch.json`` of its run directory, None if there is none; ``is_settled``: the run directory says that
    the job has ended; ``owner``: the Dagster run that followed it last, None for a job without one, which a person
    owns.
    """
    if record is None:
        return "its run directory is gone"
    if record.get("job_name") != name:
        return f"launch {record.get('launch')} ({record.get('job_name')}) has taken its place"
    if is_settled:
        return "its run directory says that it has ended"
    if record.get("cancel_asked_at"):
        return "it should have been cancelled"
    if owner is not None and owner not in live_runs:
        return f"no live Dagster run follows it; the last was {owner}"
    return ""


def is_launched_here(name: str, tags: Mapping[str, str], jobs_uri: str) -> bool:
    """Return whether a job was submitted by an orchestrator that keeps its run directories there. Pure.

    The tags alone do not tell: a copy that a person makes of a job in the Studio has its tags, and a name of its own.
    """
    job_id, launch = tags.get(JOB_TAG, ""), tags.get(LAUNCH_TAG, "")
    if not job_id or not launch.isdecimal() or tags.get(RUN_DIR_TAG) != f"{jobs_uri}/{job_id}":
        return False
    return name == job_name(job_id, int(launch))


def judge_job(job: ServiceJob, jobs_uri: str, live_runs: Collection[str]) -> Orphan | None:
    """Return a job that runs in the service as an orphan, by its run directory; None where it has an owner."""
    # A job of another container in the same workspace is judged by the orchestrator that uses it.
    if not is_launched_here(job.name, job.tags, jobs_uri):
        return None
    job_id, owner = job.tags[JOB_TAG], job.tags.get(RUN_TAG)
    rundir = RunDir(f"{jobs_uri}/{job_id}")
    try:
        record = launch_records.Launches(rundir).read()[1]
        status = rundir.read_json(STATUS) or {}
        known_owner = rundir.read_json(OWNER)
    except DamagedError as error:  # it may have an owner, so it is not ended: a person has to look
        warn_once(f"{job.name} runs, and its owner cannot be determined: {error}")
        return None
    settled = record is not None and status.get("launch") == record["launch"] and JobState(status["state"]).is_final
    owner = owner if known_owner is None else known_owner["dagster_run_id"]
    reason = why_orphaned(job.name, record, settled, owner, live_runs)
    if not reason:
        return None
    known = record or {}
    return Orphan(
        name=job.name, reason=reason, job_id=job_id, dagster_run_id=owner, state=job.status,
        since=job.created_at, node_count=known.get("node_count", 0), sku=known.get("sku", ""),
        tier=known.get("tier", ""), studio_url=job.studio_url,
    )  # fmt: skip

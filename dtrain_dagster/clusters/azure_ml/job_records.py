"""What is known of a job of Azure ML, from the service and its run directory: the facts that decide, the document of
its status, and whether anybody owns it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.azure_ml.jobs import JOB_TAG, LAUNCH_TAG, RUN_DIR_TAG, RUN_TAG
from dtrain_dagster.clusters.azure_ml.launch_record import Launches, Record, excluded, job_name
from dtrain_dagster.clusters.azure_ml.provision import NODES_THERE, Provisioner
from dtrain_dagster.clusters.azure_ml.sku_chain import SkuChoice, chain
from dtrain_dagster.clusters.azure_ml.states import JobDecision, JobFacts, ServiceJob, phase_of
from dtrain_dagster.clusters.base import OWNER, JobState, JobStatus, Orphan, Starved
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
    others = chain(record["sku"], options.chain, options.tiers, {here, *excluded(record)})
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


def has_words(text: str) -> bool:
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
        record = Launches(rundir).read()[1]
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

"""The true state of a launch, from the service and the run directory, and the decision about it. Pure.

The service's word for a job is one of several witnesses: a training that has recorded its success has succeeded, even
where its last node was lost a moment later; and a job that "fails" because its nodes went is continued elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dtrain_dagster.clusters.azure_ml.refusals import explain_loss, explain_service_loss
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.settings.azure import AzureMLOptions

WAITING = {"NotStarted", "Starting", "Provisioning", "Preparing", "Queued", "Scheduled"}
WORKING = {"Running", "Finalizing"}
ENDED = {"Completed", "Failed", "Canceled"}

# The resource manager answers 404 for what exists, for a while: its regions are consistent late (Azure's support in
# hashicorp/terraform-provider-azurerm#18268; #32535 has it of things made long before). So it takes two looks, minutes
# apart, and the answer to a cancellation to give a job up.
CANCEL_NOT_FOUND = "not found"
"""What becomes of the cancellation of a job that is gone; else it is refused, in the service's words."""
WAS_THERE = "the service did not know it for minutes, and then accepted its cancellation"
"""Why such a job is ended after all."""

Phase = Literal["waiting", "working", "silent", "paused", "stopping", "ended", "gone"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceJob:
    """A job, as the service shows it. Times are Unix seconds."""

    status: str
    """The service's word, ``""`` where there is no such job."""
    ended_at: float | None = None
    error_code: str = ""
    error_message: str = ""
    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    studio_url: str | None = None
    compute: str = ""
    created_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.status in ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """All known facts about a launch."""

    record: dict[str, Any]
    """``launch.json``, see `launch_record`."""
    job: ServiceJob
    now: float
    phase_since: float
    """The time at which the phase began that `phase_of` gives for this job."""
    result: Mapping[str, Any] | None = None
    """``result.json``, of any launch."""
    heard_at: float | None = None
    """Time at which a node of this launch was last heard of."""
    vanished: tuple[int, ...] = ()
    """Nodes of this launch that ended without a record."""
    exit_codes: tuple[int, ...] = ()
    resubmissions_left: int = 0
    nodes_ready: int | None = None
    """Nodes that the compute has for a job that waits; None: not known."""
    allocation_error: str = ""
    """Reason of the compute for not having more nodes."""
    has_alternative: bool = False
    """Whether there is another kind of node to try."""
    cancel_answer: str = ""
    """What became of the cancellation of a job that seems to be gone; "" where it was not asked for."""


@dataclass(frozen=True, slots=True)
class JobDecision:
    """The action for a launch: ``report`` its state; ``submit`` one that was never submitted; ``cancel`` one that
    somebody wants cancelled; ``stop`` this launch, to continue in another; continue in the ``next`` one; ``settle`` one
    that is over; ``wait`` for another look at one that the service does not know; ``make_sure`` that one which seems to
    be gone does not run."""

    action: Literal["report", "submit", "cancel", "stop", "next", "settle", "wait", "make_sure"]
    state: JobState
    message: str = ""


def phase_of(job: ServiceJob) -> Phase:
    """Return the phase that the service's word means."""
    if not job.status:
        return "gone"
    if job.status in WAITING:
        return "waiting"
    if job.status in WORKING:
        return "working"
    if job.status in ENDED:
        return "ended"
    if job.status == "CancelRequested":
        return "stopping"
    return "paused" if job.status == "Paused" else "silent"  # NotResponding, Unknown, and words that are new


def decide_job(facts: JobFacts, options: AzureMLOptions) -> JobDecision:
    """Return the decision about a launch. ``options``: the deadlines."""
    phase = phase_of(facts.job)
    if _says(facts, "succeeded") and phase == "ended":
        return JobDecision("settle", JobState.SUCCEEDED)
    if phase == "ended":
        return _ended(facts)
    if phase == "gone":
        return _gone(facts, options)
    if facts.record["cancel_asked_at"]:
        return JobDecision("report" if phase == "stopping" else "cancel", JobState.RUNNING, "is being cancelled")
    if facts.record["stopping"]:
        words = f"is being ended, in order to continue: {facts.record['stopping']}"
        return JobDecision("report" if phase == "stopping" else "stop", JobState.QUEUED, words)
    if phase == "working":
        return JobDecision("report", JobState.RUNNING)
    if phase == "stopping":
        return JobDecision("report", JobState.RUNNING, "is being cancelled, not from here")
    return _silent(facts, options) if phase == "silent" else _waiting(facts, options, phase == "paused")


def _ended(facts: JobFacts) -> JobDecision:
    job, record = facts.job, facts.record
    if _says(facts, "budget"):
        return _failed_by_result(facts)
    if job.status == "Completed":
        if not record["elastic"]:
            return JobDecision("settle", JobState.SUCCEEDED)
        if _says(facts, "failed"):
            return _failed_by_result(facts)
        if _says(facts, "stopped"):
            return _lost(facts, "its processes were told to end (SIGTERM)")
        return _failed("all processes exited normally, but the result does not say that the training is complete")
    if record["cancel_asked_at"]:
        return JobDecision("settle", JobState.CANCELLED, "cancelled")
    if _says(facts, "failed"):
        return _failed_by_result(facts)
    # One that was cancelled because the service seemed not to know it may have failed before that.
    if record["stopping"] and not (WAS_THERE in record["stopping"] and job.status == "Failed"):
        return _lost(facts, record["stopping"])
    was_lost = explain_service_loss(job.error_code, job.error_message)
    if job.status == "Canceled" and not (was_lost or _says(facts, "stopped")):
        return JobDecision("settle", JobState.CANCELLED, "cancelled in the workspace, not from here")
    cause = explain_loss(
        facts.exit_codes, job.error_code, job.error_message, facts.vanished, was_stopped=_says(facts, "stopped")
    )
    if cause and record["elastic"]:
        return _lost(facts, cause)
    said = ": ".join(part for part in (job.error_code, job.error_message) if part)
    return _failed(said or cause or "the service does not say why")


def _lost(facts: JobFacts, why: str) -> JobDecision:
    is_elastic, never_began = facts.record["elastic"], facts.record["nodes_ready"] == 0  # which is no resubmission
    if is_elastic and (facts.resubmissions_left > 0 or never_began):
        return JobDecision("next", JobState.QUEUED, why)
    spent = "it has been submitted again as often as is allowed" if is_elastic else "it cannot go on by itself"
    return _failed(f"{why}; {spent}")


def _failed(why: str) -> JobDecision:
    return JobDecision("settle", JobState.FAILED, why)


def _failed_by_result(facts: JobFacts) -> JobDecision:
    return _failed(str((facts.result or {}).get("error", "")))


def _gone(facts: JobFacts, options: AzureMLOptions) -> JobDecision:
    """Return the decision where the service says that it knows no such job."""
    record = facts.record
    if not (record["confirmed"] or facts.heard_at is not None):
        return _unseen(facts, options)
    lasted = 0.0 if record["missing_since"] is None else facts.now - record["missing_since"]
    if lasted < options.missing_seconds:
        words = f"the service has not known it for {lasted:.0f} s; such answers may be wrong, so it is checked again"
        return JobDecision("cancel" if record["cancel_asked_at"] else "wait", JobState.RUNNING, words)
    if not facts.cancel_answer:
        return JobDecision("make_sure", JobState.RUNNING, "is not known to the service")
    if _says(facts, "succeeded"):
        return JobDecision("settle", JobState.SUCCEEDED)
    if _says(facts, "budget") or _says(facts, "failed"):
        return _failed_by_result(facts)
    if record["cancel_asked_at"]:
        return JobDecision("settle", JobState.CANCELLED, "cancelled")
    if record["stopping"]:
        return _lost(facts, record["stopping"])
    also = "" if facts.cancel_answer == CANCEL_NOT_FOUND else f"; its cancellation was {facts.cancel_answer}"
    return _failed(f"the job was deleted from the workspace: the service has not known it for {lasted:.0f} s{also}")


def _unseen(facts: JobFacts, options: AzureMLOptions) -> JobDecision:
    """Return the decision about a job that the service has never shown: most likely it was not submitted yet."""
    if facts.record["cancel_asked_at"]:
        if not facts.cancel_answer:
            return JobDecision("make_sure", JobState.QUEUED, "is being cancelled")
        return JobDecision("settle", JobState.CANCELLED, "cancelled before it was submitted")
    if facts.now - facts.record["submitted_at"] < options.start_seconds:
        return JobDecision("report", JobState.QUEUED, "is being submitted")
    return JobDecision("submit", JobState.QUEUED, "its submitter ended before it could submit it")


def _waiting(facts: JobFacts, options: AzureMLOptions, is_paused: bool) -> JobDecision:
    """Return the decision about a job that waits for nodes, or that the service has paused."""
    waited, deadline = facts.now - facts.phase_since, options.queue_deadline_seconds
    why = f"has been paused by the service for {waited:.0f} s"
    if not is_paused:
        ready = (
            ""
            if facts.nodes_ready is None
            else f", {facts.nodes_ready} of {facts.record['node_count']} nodes are there"
        )
        cause = f" ({facts.allocation_error})" if facts.allocation_error else ""
        why = f"has been waiting for nodes for {waited:.0f} s{ready}{cause}"
        if cause and facts.has_alternative:
            deadline = min(deadline, options.allocation_patience_seconds)
    if waited <= deadline:
        return JobDecision("report", JobState.QUEUED, why)
    return JobDecision("stop", JobState.QUEUED, f"{why}: longer than {deadline:.0f} s")


def _silent(facts: JobFacts, options: AzureMLOptions) -> JobDecision:
    """Return the decision where the service does not hear the job; its nodes may still write, and then it works."""
    said = f"the service says {facts.job.status}"
    silent = facts.now - max(facts.phase_since, facts.heard_at or 0.0)
    if silent <= options.silence_seconds:
        words = f"{said}; its nodes were last heard from {max(0.0, silent):.0f} s ago"
        return JobDecision("report", JobState.RUNNING, words)
    words = f"{said}, and nothing was heard for longer than {options.silence_seconds:.0f} s"
    return JobDecision("stop", JobState.RUNNING, words)


def _says(facts: JobFacts, status: str) -> bool:
    """Return whether the trainer's own result, of this launch, has this status."""
    result = facts.result
    # A job that does not regroup knows of no launches.
    return (
        result is not None and result.get("status") == status and result.get("launch") in (None, facts.record["launch"])
    )


LONGEST_GAP_SECONDS = 3600.0
"""Age from which a first look counts no more: nobody may have looked since, and two bad moments prove nothing."""


def note_look(
    since: float | None, is_missing: bool, now: float, asked_at: float, options: AzureMLOptions
) -> float | None:
    """Return since when the service does not know a job, after one more look; None right after it was asked for
    (``asked_at``). A look that finds it, or that finds not even its workspace, begins anew, and so does one an hour
    after the first. Unix seconds."""
    if not is_missing or now - asked_at < options.start_seconds:
        return None
    return now if since is None or now - since >= LONGEST_GAP_SECONDS else since

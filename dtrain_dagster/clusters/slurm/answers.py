"""What SLURM's answers mean: a line of squeue → the state of a node, with the reason and the remedy.

Pure: what is asked, and what is done about it, belongs in `engine`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dtrain_dagster.clusters.slurm.commands import COLUMNS, END_SECONDS
from dtrain_dagster.clusters.supervision.engine import (
    Cause,
    EngineError,
    EngineJob,
    EngineUnreachableError,
    read_job_name,
)
from dtrain_dagster.settings.nodes import NODE as N
from dtrain_dagster.settings.slurm import PREFIX

PARTITION, OPTIONS = f"{PREFIX}PARTITION", f"{PREFIX}OPTIONS"
_WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
}  # fmt: skip
_ENDS: Mapping[str, tuple[str, Cause]] = {
    "COMPLETED": ("", ""),
    "FAILED": ("", ""),
    "OUT_OF_MEMORY": (f"it used more memory than it asked for; raise {N}MEMORY_GIB", "program"),
    "BOOT_FAIL": ("its machine did not start", "machine"),
    "NODE_FAIL": ("its machine failed", "machine"),
    "CANCELLED": ("it was cancelled in SLURM", "taken"),
    "DEADLINE": ("its deadline came", "taken"),
    "PREEMPTED": ("it was preempted by another job", "taken"),
    "REVOKED": ("another cluster took it", "taken"),
    "TIMEOUT": ("it reached its time limit", "taken"),
}
"""State of a job that has ended → why, in words, and whose doing that was."""
REASONS = {
    "AssocGrp": f"the limit of --account in {OPTIONS} is used up: wait, or ask for less",
    "AssocMax": f"the limit of --account in {OPTIONS} is used up: wait, or ask for less",
    "BadConstraints": f"no machine has --constraint in {OPTIONS}: correct it",
    "InvalidAccount": f"correct --account in {OPTIONS}",
    "InvalidQOS": f"correct --qos in {OPTIONS}",
    "JobHeldAdmin": "an administrator holds it: ask them",
    "JobHeldUser": "it is held: scontrol release JOB",
    "PartitionConfig": f"no node of the partition is large enough: lower {N}CPUS, {N}GPUS or {N}MEMORY_GIB, or "
    f"change {PARTITION}",
    "PartitionDown": f"the partition is down: wait, or change {PARTITION}",
    "PartitionInactive": f"the partition takes no jobs: change {PARTITION}",
    "PartitionNodeLimit": f"the partition does not give such nodes: change {PARTITION}",
    "PartitionTimeLimit": f"the partition's limit is shorter: lower time_limit_minutes in {OPTIONS}",
    "Priority": "other jobs are ahead of it",
    "QOS": f"the limit of --qos in {OPTIONS} is reached: wait, or ask for less",
    "ReqNodeNotAvail": "machines that fit are reserved or down",
    "Reservation": f"it waits for --reservation in {OPTIONS} to begin",
    "Resources": "no machine is free",
}
"""The beginning of a reason → what it means, and what helps."""
REFUSALS = {
    "walldurationperjob": f"lower time_limit_minutes in {OPTIONS}",
    "cpuperjob": f"lower {N}CPUS",
    "memperjob": f"lower {N}MEMORY_GIB",
    "gresperjob": f"lower {N}GPUS",
    "accounting/qos policy": f"it asks for more than --account or --qos in {OPTIONS} may: ask for less, or change them",
    "invalid account": f"correct --account in {OPTIONS}, or give one that may use {PARTITION}",
    "partition": f"correct {PARTITION}",
    "account": f"correct --account in {OPTIONS}",
    "qos": f"correct --qos in {OPTIONS}",
    "feature": f"correct --constraint in {OPTIONS}",
    "reservation": f"correct --reservation in {OPTIONS}",
    "gres": f"the cluster has no such GPUs: correct {N}GPUS",
    "time limit": f"lower time_limit_minutes in {OPTIONS}",
    "memory": f"lower {N}MEMORY_GIB",
    "node configuration is not available": f"no machine is large enough: lower {N}CPUS, {N}GPUS or {N}MEMORY_GIB",
    "more processors": f"no machine is large enough: lower {N}CPUS",
    "option": f"correct extra in {OPTIONS}",
}
"""What sbatch says, in lower case → the remedy; the first that is found counts."""
UNREACHABLE = (
    "unable to contact slurm", "socket timed out", "connect failure", "connection refused", "communication",
    "slurm_load_jobs error", "slurm backup controller", "zero bytes were transmitted", "temporarily", "try again",
    "slurmdbd", "expired", "munge",
)  # fmt: skip
"""What commands say, in lower case, where the same one may succeed later."""
FULL = ("submit limit", "submitjob", "job submission limit", "too many jobs")
"""What sbatch says, in lower case, where no more jobs are taken for now."""
_LIMIT_NAME = re.compile(r"(?:qos|assoc)\w*limit")
"""The name of the limit that is met, in lower case. The sentence that follows it names all that there may be."""
_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")


def read_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of squeue, by the names of the columns."""
    rows = []
    for line in text.splitlines():
        at, row = 0, {}
        for name, width in COLUMNS.items():
            row[name] = line[at : at + width].strip()
            at += width
        if row["JobID"].isdigit():  # with several clusters there are lines that name them
            rows.append(row)
    return rows


def read_job(row: Mapping[str, str]) -> EngineJob | None:
    """Return the state of a node from its row; None for a job that is no node of ours."""
    if (own := read_job_name(row["Name"])) is None:
        return None
    state, host = row["State"].split()[0], row["NodeList"]
    submitted, started, ended = (moment(row[name]) for name in ("SubmitTime", "StartTime", "EndTime"))
    limit = limit_seconds(row["TimeLimit"])
    common: dict[str, Any] = {
        "id": row["JobID"],
        "node_id": own[0],
        "incarnation": own[1],
        "host": "" if host in ("(null)", "N/A") else host,
        "submitted_at": submitted,
    }
    if state in _WAITING:
        return EngineJob(**common, state="pending", reason=explain_waiting(row["Reason"], started))
    if state not in _ENDS:
        # While a job completes, its end is no limit any more, but the moment at which it came.
        ends_at = ended if state != "COMPLETING" and limit is not None else None
        return EngineJob(**common, state="running", started_at=started, ends_at=ends_at)
    words, cause = _ENDS[state]
    is_late = started is not None and ended is not None and limit is not None and ended >= started + limit - END_SECONDS
    is_planned = state == "TIMEOUT" or (state == "FAILED" and is_late)
    cause = "taken" if is_planned else cause
    return EngineJob(
        **common,
        state="ended",
        reason=f"{state}: {words}" if words else "",
        exit_code=exit_code_of(state, row["exit_code"]),
        lost=cause in ("taken", "machine"),
        cause=cause,
        is_planned=is_planned,
        started_at=started,
        ended_at=ended,
    )


def explain_waiting(reason: str, starts_at: float | None) -> str:
    """Return why a job waits, in SLURM's word and in ours, and when SLURM expects it to start (Unix seconds; None where
    it does not say)."""
    words = next((words for name, words in REASONS.items() if reason.startswith(name)), "")
    when = f"expected to start at {datetime.fromtimestamp(starts_at, UTC):%Y-%m-%d %H:%M} UTC" if starts_at else ""
    said = reason if reason not in ("None", "") else "not looked at yet"
    return ", ".join(filter(None, [f"{said}: {words}" if words else said, when]))


def exit_code_of(state: str, raw: str) -> int | None:
    """Return the exit code of the agent, or minus the number of the signal, from squeue's wait status; None where it is
    unknown."""
    if state == "OUT_OF_MEMORY":
        return -9
    if not raw.isdigit():
        return None
    status = int(raw)
    return -(status & 0x7F) if status & 0x7F else status >> 8


def moment(text: str) -> float | None:
    """Return a time as Unix seconds; None for one that is not known."""
    return float(text) if text.isdigit() else None


def limit_seconds(text: str) -> float | None:
    """Return a time limit in seconds; None for none."""
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    parts = {name: int(value or 0) for name, value in match.groupdict().items()}
    return 86400 * parts["days"] + 3600 * parts["hours"] + 60.0 * parts["minutes"] + parts["seconds"]


def read_failure(what: str, said: str) -> EngineError | EngineUnreachableError:
    """Return the error of a command that has failed, by what it said: one that has to be corrected, with the remedy, or
    one after which the same command may succeed later."""
    words = said.lower()
    limits = _LIMIT_NAME.findall(words)
    if any(word in text for text in limits or [words] for word in FULL):
        return EngineUnreachableError(f"the queue is full: SLURM takes no more jobs of this user now ({said})")
    if any(word in words for word in UNREACHABLE):
        return EngineUnreachableError(f"cannot {what} now: {said}")
    remedy = next((remedy for word, remedy in REFUSALS.items() if word in words), f"see {PREFIX} in the settings")
    return EngineError(f"cannot {what}: {said}; {remedy}")

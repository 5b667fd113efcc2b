"""The facts about a launch, from the service, the launch record and the run directory, for `states.decide_job`.

Of a job that the service says not to know, the looks that count are kept in its launch record, and before it is given
up it is cancelled, in case that the answers were wrong. When it is given up is decided in `states`, by the rules of
`absence`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.azure_ml import launch_record as launch_records
from dtrain_dagster.clusters.azure_ml.absence import (
    CANCEL_NOT_FOUND,
    CANCEL_TAKEN,
    AbsencePatience,
    Answer,
    note_look,
)
from dtrain_dagster.clusters.azure_ml.client import ServiceRefused
from dtrain_dagster.clusters.azure_ml.jobs import Jobs, ServiceJob
from dtrain_dagster.clusters.azure_ml.launch_record import Launches, Record
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from dtrain_dagster.clusters.azure_ml.provision import NODES_THERE, Provisioner
from dtrain_dagster.clusters.azure_ml.sku_chain import SkuChoice, chain
from dtrain_dagster.clusters.azure_ml.states import JobFacts, Look, Patience, phase_of
from trainer.rundir import RESULT, RunDir

_log = logging.getLogger(__name__)


def absence_patience(options: AzureMLOptions) -> AbsencePatience:
    """Return the patience with a job that the service says not to know."""
    return AbsencePatience(seconds=options.missing_seconds, grace_seconds=options.start_seconds)


def job_patience(options: AzureMLOptions) -> Patience:
    """Return the deadlines for a launch."""
    return Patience(
        queue=options.queue_deadline_seconds,
        allocation=options.allocation_patience_seconds,
        silence=options.silence_seconds,
        start=options.start_seconds,
        absence=absence_patience(options),
    )


def list_alternatives(record: Record, options: AzureMLOptions) -> list[SkuChoice]:
    """Return the kinds of nodes that are left to try after this launch's."""
    here = SkuChoice(sku=record["sku"], tier=record["tier"])
    return chain(record["sku"], options.chain, options.tiers, {here, *launch_records.excluded(record)})


def gather_facts(
    record: Record, job: ServiceJob | None, status: Mapping[str, Any], rundir: RunDir, provisioner: Provisioner
) -> JobFacts:
    """Return the facts about a launch now. ``status``: ``status.json``. Raise `ServiceError` where the service does not
    say what nodes it has for a job that waits."""
    now, options = time.time(), provisioner.options
    look = job.look if job is not None else Look(status="")
    phase = phase_of(look)
    nodes = [node for node in rundir.nodes() if node.launch == record["launch"]]
    since = record["submitted_at"]
    if status.get("launch") == record["launch"] and phase not in ("submitting", "gone"):
        since = status["phase_since"] if status.get("phase") == phase else now
    ready, error = None, ""
    patience = options.look_patience_seconds
    if phase == "waiting":
        there = provisioner.nodes(record["compute"], patience)
        ready = sum(state in NODES_THERE and job_name in (None, "") for _, state, job_name in there)
        if ready < record["node_count"]:
            error = provisioner.allocation_error(record["compute"], patience)
    heard_at = max((node.last_seen_at or node.started_at for node in nodes), default=None)
    return JobFacts(
        look=look,
        now=now,
        launch=record["launch"],
        node_count=record["node_count"],
        elastic=record["elastic"],
        submitted_at=record["submitted_at"],
        phase_since=since,
        seen=record["confirmed"] or heard_at is not None,
        misses=tuple(record.get("missing_at") or ()),
        missing_cancel=record.get("missing_cancel") or "",
        result=rundir.read_json(RESULT),
        heard_at=heard_at,
        vanished=tuple(node.node_id for node in presences.find_latest_presences(nodes) if node.ended_at is None),
        exit_codes=tuple(code for node in presences.find_latest_presences(nodes) for code in node.exit_codes),
        cancel_asked=record["cancel_asked_at"] is not None,
        stopping=record["stopping"],
        never_began=record["nodes_ready"] == 0,
        resubmissions_left=options.max_resubmissions - (record["launch"] - record["first_launch"]),
        nodes_ready=ready,
        allocation_error=error,
        has_alternative=bool(list_alternatives(record, options)),
    )


class MissingJobKeeper:
    """The owner of ``missing_at`` and ``missing_cancel`` in the launch record of one job."""

    def __init__(self, launches: Launches, jobs: Jobs) -> None:
        self.launches, self.jobs = launches, jobs
        self.patience = absence_patience(jobs.options)

    def note(self, record: Record, answer: Answer) -> Record:
        """Record what came of a look at this launch, and return its record. Nothing is written where nothing
        changes."""
        before = record.get("missing_at") or []
        after = list(note_look(before, answer, time.time(), record["submitted_at"], self.patience))
        if after == before:
            return record
        fields = {"missing_at": after} if after else {"missing_at": [], "missing_cancel": ""}
        return self.launches.change(record["token"], **fields) or record

    def make_sure(self, record: Record) -> Record | None:
        """Cancel a job that seems to be gone, and return its record with what became of that; None where another launch
        counts by now. Raise `ServiceUnreachable` where the service does not answer.

        If the service takes the cancellation, the job is there: it is then waited for, and gone on with elsewhere.
        """
        name = record["job_name"]
        try:
            why = "the service does not know it, but it might be running anyway"
            is_known = self.jobs.cancel(name, why, self.jobs.options.look_patience_seconds)
            answer = CANCEL_TAKEN if is_known else CANCEL_NOT_FOUND
        except ServiceRefused as error:
            answer = f"refused: {error}"
        fields: Record = {"missing_cancel": answer}
        if answer == CANCEL_TAKEN:
            reason = record["stopping"] or "the service did not know it for minutes, and then accepted its cancellation"
            fields |= {"missing_at": [], "stopping": reason}
        _log.warning("job %s is not known to the service; its cancellation: %s", name, answer)
        return self.launches.change(record["token"], **fields)

"""A job that the service says not to know: the looks that count are kept in its launch record, and before it is given
up it is cancelled, in case that the answers were wrong.

When it is given up is decided in `states`, by the rules of `absence`.
"""

from __future__ import annotations

import logging
import time

from dtrain_dagster.clusters.azure_ml.absence import (
    CANCEL_NOT_FOUND,
    CANCEL_TAKEN,
    AbsencePatience,
    Answer,
    note_look,
)
from dtrain_dagster.clusters.azure_ml.client import ServiceRefused
from dtrain_dagster.clusters.azure_ml.jobs import Jobs
from dtrain_dagster.clusters.azure_ml.launch_record import Launches, Record
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions

_log = logging.getLogger(__name__)


def absence_patience(options: AzureMLOptions) -> AbsencePatience:
    """Return the patience with a job that the service says not to know."""
    return AbsencePatience(seconds=options.missing_seconds, grace_seconds=options.start_seconds)


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

"""The ledger of a fleet: the entries of all of its jobs' ledgers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain_dagster.costs.ledger import Ledger
from dtrain_dagster.costs.tracker import CostTracker


class LedgerError(ValueError):
    """A ledger does not sum to what was paid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLedger:
    """What all jobs of a fleet have cost."""

    jobs: Mapping[str, Ledger]
    whole: Ledger
    """All of these."""


def add_ledgers(bills: Mapping[str, tuple[CostTracker, Ledger]]) -> FleetLedger:
    """Return the ledger of a fleet. Raise `LedgerError`, which names the job, where one does not sum to its bill."""
    for job_id, (tracker, found) in bills.items():
        paid = sum(node.microseconds for node in tracker.nodes)
        if (paid, tracker.total_units) != (found.microseconds, found.units):
            raise LedgerError(
                f"job {job_id}: its ledger has {found.microseconds} microseconds of nodes, paid were {paid}"
            )
    jobs = {job_id: found for job_id, (_, found) in bills.items()}
    entries = tuple(entry for found in jobs.values() for entry in found.entries)
    return FleetLedger(jobs=jobs, whole=Ledger(entries=entries, notes=()))

"""The ledger of a fleet: the sum of its jobs' ledgers, in which every node-second of every job is in one row. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dtrain_dagster.costs.ledger import Ledger, Row
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker


class LedgerError(ValueError):
    """A ledger does not sum to what was paid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobBill:
    """What one job cost, and what for."""

    tracker: CostTracker
    ledger: Ledger

    @property
    def microseconds(self) -> int:
        """Return the paid node-time."""
        return sum(node.microseconds for node in self.tracker.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLedger:
    """The ledgers of all jobs of a fleet, by job."""

    bills: Mapping[str, JobBill]

    @property
    def microseconds(self) -> int:
        """Return the paid node-time of all jobs."""
        return sum(bill.ledger.microseconds for bill in self.bills.values())

    @property
    def units(self) -> int:
        """Return what all jobs cost, in the units of `dtrain_dagster.costs.money`."""
        return sum(bill.ledger.units for bill in self.bills.values())

    def causes(self) -> dict[CostCause, Row]:
        """Return every cause that took some time, over all jobs."""
        sums: dict[CostCause, list[int]] = {}
        for bill in self.bills.values():
            for cause, row in bill.ledger.causes().items():
                both = sums.setdefault(cause, [0, 0])
                both[0] += row.microseconds
                both[1] += row.units
        return {
            cause: Row(microseconds=sums[cause][0], units=sums[cause][1]) for cause in CostCause if cause in sums
        }  # fmt: skip

    def by_job(self) -> dict[str, Row]:
        """Return the sum of each job."""
        return {
            job_id: Row(microseconds=bill.ledger.microseconds, units=bill.ledger.units)
            for job_id, bill in self.bills.items()
        }


def add_ledgers(bills: Mapping[str, JobBill]) -> FleetLedger:
    """Return the ledger of a fleet. Raise `LedgerError`, which names the job, where one does not sum to its bill."""
    for job_id, bill in bills.items():
        if (bill.microseconds, bill.tracker.total_units) != (bill.ledger.microseconds, bill.ledger.units):
            raise LedgerError(
                f"job {job_id}: its ledger has {bill.ledger.microseconds} microseconds of nodes, paid were "
                f"{bill.microseconds}"
            )
    return FleetLedger(bills=bills)

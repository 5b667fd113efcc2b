"""The ledger of a fleet: the sum of its jobs' ledgers, in which every node-second of every job is in one row. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dtrain_dagster.costs.ledger import Ledger, Row
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker


class LedgerError(ValueError):
    """A ledger does not sum to what was paid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLedger:
    """What all jobs of a fleet have cost."""

    jobs: Mapping[str, Row]
    causes: Mapping[CostCause, Row]
    """Every cause that took some time, over all jobs."""

    @property
    def microseconds(self) -> int:
        """Return the paid node-time of all jobs."""
        return sum(row.microseconds for row in self.jobs.values())

    @property
    def units(self) -> int:
        """Return what all jobs cost, in the units of `dtrain_dagster.costs.money`."""
        return sum(row.units for row in self.jobs.values())


def add_ledgers(bills: Mapping[str, tuple[CostTracker, Ledger]]) -> FleetLedger:
    """Return the ledger of a fleet. Raise `LedgerError`, which names the job, where one does not sum to its bill."""
    jobs, seconds, units = dict[str, Row](), Counter[CostCause](), Counter[CostCause]()
    for job_id, (tracker, found) in bills.items():
        paid = sum(node.microseconds for node in tracker.nodes)
        if (paid, tracker.total_units) != (found.microseconds, found.units):
            raise LedgerError(
                f"job {job_id}: its ledger has {found.microseconds} microseconds of nodes, paid were {paid}"
            )
        jobs[job_id] = Row(microseconds=found.microseconds, units=found.units)
        for cause, row in found.causes().items():
            seconds[cause] += row.microseconds
            units[cause] += row.units
    causes = {cause: Row(microseconds=seconds[cause], units=units[cause]) for cause in CostCause if cause in seconds}
    return FleetLedger(jobs=jobs, causes=causes)

"""The ceiling on what all jobs of a home may cost in a calendar month (UTC).

It is in ``ceilings.json`` of the home. A start is refused where what was spent this month, what running jobs were
promised and what the start may cost exceed it; nothing that runs is ended. What was spent and promised is gathered in
`dtrain_dagster.jobs.spending`; what follows from it is decided here. Pure but for the file. Amounts are in the units of
`dtrain_dagster.costs.money`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path

from dtrain_dagster.costs.money import USD, usd
from dtrain_dagster.support.formatting import dollars
from trainer.documents.reader import MARK_BYTES, read_document
from trainer.documents.schemas import matching, optional, record
from trainer.errors import DamagedError
from trainer.storage.open import open_storage

CEILINGS = "ceilings.json"
PER_MONTH = "per_month"
"""The one field of `CEILINGS`."""
COMMAND = "dtrain cost ceilings"
MOST_DOLLARS = 10**9
MOST_NAMED = 5
_REMEDY = f"set it again by {COMMAND} --per-month AMOUNT, or lift it by --none"
_SCHEMA = record(**{PER_MONTH: optional(matching(r"\d{1,10}(\.\d{1,9})?"))})


class CeilingError(ValueError):
    """The ceiling refuses a start, or cannot be told. The message says which, and the remedy."""


def read_dollars(text: str) -> Decimal:
    """Return an amount of US dollars as a person gives it. Raise ValueError where it is none, or not above 0."""
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is no amount of US dollars, such as 500 or 12.50") from None
    if not amount.is_finite() or not 0 < amount <= MOST_DOLLARS:
        raise ValueError(f"{text!r} is not above 0 and at most {MOST_DOLLARS:,} US dollars")
    if amount != round(amount, 9):
        raise ValueError(f"{text!r} has more than nine decimal places")
    return amount


def read_ceiling(home: Path) -> Decimal | None:
    """Return the US dollars that a home may spend in a month; None without a ceiling. Raise `CeilingError` where that
    cannot be read, or is of another kind: a ceiling that is not known is not held."""
    try:
        found = read_document(open_storage(str(home)), CEILINGS, _SCHEMA, MARK_BYTES) or {}
    except (DamagedError, OSError) as error:
        raise CeilingError(
            f"the ceiling on spending cannot be read, so nothing is started: {error}; {_REMEDY}"
        ) from None
    if unknown := found.keys() - {PER_MONTH}:
        raise CeilingError(
            f"{CEILINGS} has {', '.join(sorted(unknown))}, which this version does not hold, so nothing is started: "
            f"{_REMEDY}"
        )
    return None if found.get(PER_MONTH) is None else Decimal(found[PER_MONTH])


def write_ceiling(home: Path, per_month: Decimal | None) -> None:
    """Write the ceiling of a home in US dollars; None: remove it."""
    storage = open_storage(str(home))
    if per_month is None:
        storage.delete(CEILINGS)
    else:
        storage.write(CEILINGS, json.dumps({PER_MONTH: f"{per_month:f}"}).encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """What one job, or a fleet without its jobs, has spent and may still spend. In units."""

    name: str
    month_units: int = 0
    promised_units: int = 0
    """What it may still cost: what is left of its estimate or its hard budget; 0 once it has ended."""
    unknown: str = ""
    """Why its cost is not known; then it counts as nothing, and is named."""

    @property
    def units(self) -> int:
        return self.month_units + self.promised_units


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """How much of the ceiling is used. Amounts are in units."""

    per_month: Decimal
    """The ceiling, in US dollars."""
    month: str
    """The month, such as 2026-11."""
    spending: tuple[Spending, ...] = ()
    wanted: int = 0
    """What a start adds."""

    @property
    def limit(self) -> int:
        return int(self.per_month * USD)

    @property
    def spent(self) -> int:
        return sum(item.month_units for item in self.spending)

    @property
    def promised(self) -> int:
        return sum(item.promised_units for item in self.spending)

    @property
    def total(self) -> int:
        return self.spent + self.promised + self.wanted

    @property
    def left(self) -> int:
        """Return what the start may cost."""
        return self.limit - self.spent - self.promised

    @property
    def by(self) -> dict[str, int]:
        """Return the jobs that cost the most, and how much."""
        ordered = sorted(self.spending, key=lambda item: (-item.units, item.name))
        return {item.name: item.units for item in ordered[:MOST_NAMED] if item.units}

    @property
    def text(self) -> str:
        """Return how much is used, in a sentence without its end."""
        wanted = f", and this start adds {dollars(usd(self.wanted))}" if self.wanted else ""
        return (
            f"{dollars(usd(self.limit))} per month: {dollars(usd(self.spent))} spent in {self.month}, "
            f"{dollars(usd(self.promised))} promised to running jobs{wanted}"
        )

    @property
    def most(self) -> str:
        """Return the jobs that cost the most in words: ``; most by a $3.00``; "" where none does."""
        users = ", ".join(f"{name} {dollars(usd(units))}" for name, units in self.by.items())
        return f"; most by {users}" if users else ""

    @property
    def not_counted(self) -> list[str]:
        """Return a sentence for each job whose cost is not known, and does not count."""
        return [f"not counted is {item.name}: {item.unknown}" for item in self.spending if item.unknown]

    @property
    def refusal(self) -> str | None:
        """Return why the start is refused, and the remedy; None where it fits."""
        if self.total <= self.limit:
            return None
        remedy = f"start something smaller, wait for next month, or raise it: {COMMAND} --per-month AMOUNT"
        return "; ".join([f"the ceiling of {self.text}{self.most}", *self.not_counted, remedy])


def stand_of(per_month: Decimal, month: str, spending: Sequence[Spending], wanted: Spending | None = None) -> Stand:
    """Return how much of the ceiling is used, with a ``wanted`` start, or without one. A job of the name of the wanted
    one is continued by it: its promise is replaced, and not added. Pure."""
    if wanted is None:
        return Stand(per_month=per_month, month=month, spending=tuple(spending))
    others = (replace(item, promised_units=0) if item.name == wanted.name else item for item in spending)
    return Stand(per_month=per_month, month=month, spending=tuple(others), wanted=wanted.promised_units)


def month_of(now: float) -> tuple[str, float]:
    """Return the calendar month of a time (UTC), such as ``2026-11``, and its first moment, in Unix seconds."""
    moment = datetime.fromtimestamp(now, UTC)
    first = datetime(moment.year, moment.month, 1, tzinfo=UTC)
    return f"{first:%Y-%m}", first.timestamp()

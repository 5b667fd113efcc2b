"""Ceilings on what a home may spend: dollars per hour, and per calendar month (UTC).

They are in ``ceilings.json`` of the home. A start that would exceed one is refused; nothing that runs is ended. What
has been spent and promised is gathered in `dtrain_dagster.jobs.spending`; what follows from it is decided here. Pure
but for the file. Amounts are in the units of `dtrain_dagster.costs.money`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal

from dtrain_dagster.costs.money import USD, usd
from dtrain_dagster.support.formatting import dollars
from trainer.documents.reader import MARK_BYTES, read_document
from trainer.documents.schemas import matching, optional, record
from trainer.errors import DamagedError
from trainer.storage.open import open_storage

CEILINGS = "ceilings.json"
COMMAND = "dtrain cost ceilings"
MOST_DOLLARS = 10**9
MOST_NAMED = 5
Kind = Literal["per_hour", "per_month"]
KINDS: Mapping[Kind, str] = {"per_hour": "per hour", "per_month": "per month"}
"""Field of `Ceilings` → its name for people."""
_REMEDY = f"lift all ceilings by {COMMAND} --none, and set --per-month AMOUNT or --per-hour AMOUNT"
_AMOUNT = optional(matching(r"\d{1,10}(\.\d{1,9})?"))
_SCHEMA = record(**dict.fromkeys(KINDS, _AMOUNT))


class CeilingError(ValueError):
    """A ceiling refuses a start, or cannot be told. The message says which, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """The ceilings of a home in US dollars; None: no such ceiling."""

    per_hour: Decimal | None = None
    per_month: Decimal | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, kind) is not None for kind in KINDS)

    def limits(self) -> dict[Kind, int]:
        return {kind: int(value * USD) for kind in KINDS if (value := getattr(self, kind)) is not None}


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


def read_ceilings(home: Path) -> Ceilings:
    """Return the ceilings of a home. Raise `CeilingError` where they cannot be read: one that is not known is not
    held."""
    try:
        found = read_document(open_storage(str(home)), CEILINGS, _SCHEMA, MARK_BYTES) or {}
    except (DamagedError, OSError) as error:
        raise CeilingError(
            f"the ceilings on spending cannot be read, so nothing is started: {error}; {_REMEDY}"
        ) from None
    if unknown := found.keys() - KINDS.keys():
        raise CeilingError(
            f"{CEILINGS} has {', '.join(sorted(unknown))}, which this version does not hold, so nothing is started: "
            f"{_REMEDY}"
        )
    return Ceilings(**{kind: None if found.get(kind) is None else Decimal(found[kind]) for kind in KINDS})


def write_ceilings(home: Path, ceilings: Ceilings) -> None:
    """Write the ceilings of a home as a whole; without one, remove the file."""
    storage = open_storage(str(home))
    document = {kind: f"{value:f}" for kind in KINDS if (value := getattr(ceilings, kind)) is not None}
    if document:
        storage.write(CEILINGS, json.dumps(document, indent=2).encode())
    else:
        storage.delete(CEILINGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """What one job, or a fleet without its jobs, has spent and may still spend. In units."""

    name: str
    month_units: int = 0
    promised_units: int = 0
    """What it may still cost: what is left of its estimate or its hard budget; 0 once it has ended."""
    hourly_units: int = 0
    """What its nodes cost in an hour; 0 once it has ended."""
    unknown: str = ""
    """Why its cost is not known; then it counts as nothing, and is named."""

    @property
    def units(self) -> int:
        return self.month_units + self.promised_units


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """How much of one ceiling is used. In units."""

    kind: Kind
    limit: int
    spent: int = 0
    """Paid in the month; of the ceiling per hour, what runs costs in an hour."""
    promised: int = 0
    wanted: int = 0
    by: tuple[tuple[str, int], ...] = ()
    """The jobs that cost the most, and how much."""

    @property
    def total(self) -> int:
        return self.spent + self.promised + self.wanted

    @property
    def share(self) -> float:
        return self.total / self.limit

    @property
    def is_exceeded(self) -> bool:
        return self.total > self.limit

    @property
    def title(self) -> str:
        return KINDS[self.kind]


def stands_of(ceilings: Ceilings, spending: Sequence[Spending], wanted: Spending | None = None) -> list[Stand]:
    """Return how much of each ceiling is used, with a ``wanted`` start, or without one. A job of the name of the wanted
    one is continued by it: its promise is replaced, and not added. Pure."""
    if wanted is not None:
        spending = [
            replace(item, promised_units=0, hourly_units=0) if item.name == wanted.name else item for item in spending
        ]
    found = list[Stand]()
    for kind, limit in ceilings.limits().items():
        is_hourly = kind == "per_hour"
        used = {item.name: item.hourly_units if is_hourly else item.units for item in spending}
        ordered = sorted(used.items(), key=lambda item: (-item[1], item[0]))
        found.append(
            Stand(
                kind=kind,
                limit=limit,
                spent=sum(item.hourly_units if is_hourly else item.month_units for item in spending),
                promised=0 if is_hourly else sum(item.promised_units for item in spending),
                wanted=0 if wanted is None else wanted.hourly_units if is_hourly else wanted.units,
                by=tuple(item for item in ordered if item[1])[:MOST_NAMED],
            )
        )
    return found


def describe_stand(stand: Stand, month: str) -> str:
    """Return how much of a ceiling is used, in a sentence without its end. ``month``: such as 2026-11. Pure."""
    wanted = f", and this start adds {dollars(usd(stand.wanted))}" if stand.wanted else ""
    head = f"{dollars(usd(stand.limit))} {stand.title}"
    if stand.kind == "per_hour":
        return f"{head}: running jobs cost {dollars(usd(stand.spent))} an hour{wanted}"
    return (
        f"{head}: {dollars(usd(stand.spent))} spent in {month}, {dollars(usd(stand.promised))} promised to running "
        f"jobs{wanted}"
    )


def describe_most(stand: Stand) -> str:
    """Return the jobs that cost the most, and how much; "" where none does. Pure."""
    return ", ".join(f"{name} {dollars(usd(units))}" for name, units in stand.by)


def explain_excess(stands: Sequence[Stand], spending: Sequence[Spending], month: str) -> str | None:
    """Return which ceilings a start exceeds, by which jobs, and the remedy; None where it exceeds none. Pure."""
    over = [stand for stand in stands if stand.is_exceeded]
    if not over:
        return None
    lines = []
    for stand in over:
        users = describe_most(stand)
        lines.append(f"the ceiling of {describe_stand(stand, month)}" + (f"; most by {users}" if users else ""))
    options = " ".join(f"--{stand.kind.replace('_', '-')} AMOUNT" for stand in over)
    wait = "wait until a job has ended" if all(stand.kind == "per_hour" for stand in over) else "wait for next month"
    remedy = f"start something smaller, {wait}, or raise it: {COMMAND} {options}"
    return "; ".join([*lines, *explain_unknown(spending), remedy])


def explain_unknown(spending: Sequence[Spending]) -> list[str]:
    """Return a sentence for each job whose cost is not known, and does not count. Pure."""
    return [f"not counted is {item.name}: {item.unknown}" for item in spending if item.unknown]


def month_of(now: float) -> tuple[str, float]:
    """Return the calendar month of a time (UTC), such as ``2026-11``, and its first moment, in Unix seconds."""
    moment = datetime.fromtimestamp(now, UTC)
    first = datetime(moment.year, moment.month, 1, tzinfo=UTC)
    return f"{first:%Y-%m}", first.timestamp()

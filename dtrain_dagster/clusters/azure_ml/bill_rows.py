"""The rows of Azure's bill, from any of the shapes in which it is given out. Pure: bytes or text in, rows out.

Four shapes are read: the CSV of a cost details export in the classic columns (Enterprise and customer agreements name
and write them differently) and in those of FOCUS, the JSON answer of a Cost Management query, and the JSON list of
usage details. Days are UTC days in all. Whose a row is, `bill_matching` beside this module decides.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from dtrain_dagster.costs.money import USD

COLUMNS = {
    "date": ("date", "usagedate", "usagedatetime", "usagestart", "chargeperiodstart"),
    "cost": ("costinbillingcurrency", "pretaxcost", "cost", "totalcost", "billedcost"),
    "currency": ("billingcurrency", "billingcurrencycode", "currency"),
    "meter": ("metercategory", "xskumetercategory", "servicename"),
    "resource": ("resourceid", "instanceid", "instancename", "resource", "resourcename"),
    "tags": ("tags", "tag"),
    "name": ("metername", "xskumetername", "skumeter", "meter"),
    "quantity": ("quantity", "usagequantity", "consumedquantity"),
    "unit": ("unitofmeasure", "consumedunit"),
    "usd": ("costinusd", "costusd", "pretaxcostusd", "xbilledcostinusd"),
    "pricing_cost": ("costinpricingcurrency", "xcostinpricingcurrency"),
    "pricing_currency": ("pricingcurrency", "pricingcurrencycode", "xpricingcurrency"),
    "info": ("additionalinfo", "xskudetails", "skupricedetails", "additionalproperties"),
}
"""Names of each column in all shapes, their letters alone and small. The first that is there counts. Those of the
classic schemas as in microsoft/finops-toolkit, EA_ActualCost_Small.csv, and finopsfoundation/focus_converters,
sample-anonymous-ea-export-dataset.csv; those of FOCUS as in learn.microsoft.com/cloud-computing/finops/focus/metadata.
"""
NEEDED = ("date", "cost", "currency", "meter")
HOW = (
    "Export 'Cost and usage details'. A query, grouped by ResourceId, MeterCategory and Meter with daily granularity, "
    "cannot tell the computes of a workspace apart"
)
POOL_KEYS = ("poolname", "computetargetname")
"""Keys of the additional information that name the compute of Azure ML, in small letters: users' reports of exports
take PoolName, and ComputeTargetName where it is missing."""


class UsageError(ValueError):
    """The export cannot be used. The message names the file, what is wrong and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BilledUsage:
    """One row of an export."""

    day: date
    meter: str
    """Category of the meter."""
    name: str
    resource: str
    tags: str
    info: str
    pool: str
    """The service's name of the nodes' pool, in small letters: ``<compute>_<guid>`` for Azure ML; "" where none is
    named."""
    size: str
    """Size of the nodes, in small letters; "" where it is not stated."""
    units: int
    """Billed amount in the units of `dtrain_dagster.costs.money`."""
    hours: float | None
    """Quantity, where its unit is hours."""
    raw: str
    """All cells of the row, by which it is known when it comes again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """Rows that were in the file more than once."""

    dropped: tuple[BilledUsage, ...] = ()
    """Repetitions that are not counted, because their whole day is repeated."""
    doubtful: tuple[BilledUsage, ...] = ()
    """Repetitions that are counted: they may be two nodes with equal hours."""


def decode_export(data: bytes, source: str) -> str:
    """Return the text of an export, which Azure also writes compressed. Raise `UsageError` where it is damaged, or in
    another format."""
    if data.startswith(b"PAR1"):
        raise UsageError(f"{source} is a Parquet file: choose CSV as the format of the export")
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{source} cannot be decompressed ({error}): download it again") from None
    return data.decode("utf-8-sig", errors="replace")


def read_usage(text: str, source: str) -> list[BilledUsage]:
    """Return the rows of an export, in any shape. Raise `UsageError` where it is none, or has no US dollars."""
    header, rows = _json_rows(text, source) if text.lstrip()[:1] in ("{", "[") else _csv_rows(text)
    names = {re.sub(r"[^a-z]", "", name.lower()): place for place, name in reversed(list(enumerate(header)))}
    places = {
        what: next((names[name] for name in known if name in names), None) for what, known in COLUMNS.items()
    }  # fmt: skip
    missing = [what for what in NEEDED if places[what] is None]
    if places["resource"] is None and places["tags"] is None:
        missing.append("resource")
    if missing:
        wanted = "; ".join(f"{what} ({' or '.join(COLUMNS[what])})" for what in missing)
        raise UsageError(f"{source} has no column for {wanted}; it has {', '.join(header) or 'none'}. {HOW}")

    def of(row: Sequence[Any], what: str) -> Any:
        place = places[what]
        return row[place] if place is not None and place < len(row) and row[place] is not None else ""

    found = []
    for number, row in enumerate(rows, 2):
        try:
            found.append(_usage({what: of(row, what) for what in COLUMNS}, json.dumps(row, default=str)))
        except (ValueError, InvalidOperation, OverflowError) as error:
            raise UsageError(f"{source}, row {number}: {error}") from None
    return found


def drop_repeats(rows: Iterable[BilledUsage]) -> tuple[list[BilledUsage], Repeats]:
    """Return the rows without those that a re-run of the export has written again, and what was repeated.

    Rows have no identity, and two nodes with equal hours give equal rows. But a re-run repeats whole days. So a day is
    repeated if each of its rows, at least two different ones, is there the same number of times or a multiple of it. A
    day of one row counts as repeated if other days are.
    """
    days: dict[date, dict[str, list[BilledUsage]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        days[row.day][row.raw].append(row)
    times = {day: math.gcd(*(len(same) for same in groups.values())) for day, groups in days.items()}
    known = Counter(times[day] for day, groups in days.items() if len(groups) > 1 and times[day] > 1)
    kept: list[BilledUsage] = []
    dropped: list[BilledUsage] = []
    doubtful: list[BilledUsage] = []
    for day, groups in days.items():
        is_repeated = times[day] > 1 and (len(groups) > 1 or bool(known[times[day]]))
        for same in groups.values():
            stay = len(same) // times[day] if is_repeated else len(same)
            kept += same[:stay]
            dropped += same[stay:]
            doubtful += same[1:stay]
    return kept, Repeats(dropped=tuple(dropped), doubtful=tuple(doubtful))


def fields_of(text: str) -> dict[str, str]:
    """Return the fields of tags or additional information: a JSON object, with or without its braces (the classic
    schema of Enterprise Agreements leaves them away). Keys are in small letters, and without the ``x_`` of FOCUS 1.2.
    {} for anything else."""
    for candidate in (text, f"{{{text}}}"):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            known = {str(key).casefold().removeprefix("x_"): value for key, value in found.items()}
            return {key: str(value) for key, value in known.items() if value is not None}
    return {}


def _usage(row: Mapping[str, Any], raw: str) -> BilledUsage:
    unit, quantity = str(row["unit"]), str(row["quantity"]).strip()
    info, tags = _text(row["info"]), _text(row["tags"])
    known = fields_of(tags) | fields_of(info)
    is_hours = "hour" in unit.casefold() or not unit.strip()
    return BilledUsage(
        day=_day(row["date"]),
        meter=str(row["meter"]),
        name=str(row["name"]),
        resource=str(row["resource"]),
        tags=tags,
        info=info,
        pool=next((known[key].casefold() for key in POOL_KEYS if known.get(key)), ""),
        size=known.get("servicetype", "").casefold(),
        units=round(_dollars(row) * USD),
        hours=float(quantity) * _unit_size(unit) if quantity and is_hours else None,
        raw=raw,
    )


def _dollars(row: Mapping[str, Any]) -> Decimal:
    """Return the cost in US dollars: as billed, else the column in dollars, else that in the currency of the price
    list. Raise ValueError where there is none, or for what is no number."""
    currency = str(row["currency"]).strip().upper()
    cost = row["cost"]
    if currency != "USD":
        if row["usd"] != "":
            cost = row["usd"]
        elif str(row["pricing_currency"]).strip().upper() == "USD" and row["pricing_cost"] != "":
            cost = row["pricing_cost"]
        else:
            raise ValueError(
                f"the currency is {currency or 'not given'}, ours are US dollars: export with the column CostInUsd or "
                "in the FOCUS schema (x_BilledCostInUsd), or query CostUSD"
            )
    amount = Decimal(str(cost).strip() or "0")
    if not amount.is_finite():
        raise ValueError(f"a cost of {cost!r} is not a number")
    return amount


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _unit_size(unit: str) -> float:
    """Return the size of a unit: 10 for ``10 Hours``."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)", unit)
    return float(found[1]) if found else 1.0


def _day(value: Any) -> date:
    """Return the date of 2026-06-01, 2026-06-01T00:00:00Z, 06/01/2026 (6/1/2026) or 20260601."""
    text = str(value).strip()
    for pattern, part in (("%Y-%m-%d", text[:10]), ("%m/%d/%Y", text.split(" ")[0]), ("%Y%m%d", text[:8])):
        try:
            return datetime.strptime(part, pattern).date()  # noqa: DTZ007
        except ValueError:
            continue
    raise ValueError(f"{text!r} is not a date; 2026-06-01, 06/01/2026 and 20260601 are")


def _csv_rows(text: str) -> tuple[list[str], list[list[str]]]:
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    return (rows[0], rows[1:]) if rows else ([], [])


def _json_rows(text: str, source: str) -> tuple[list[str], list[Any]]:
    try:
        answer = json.loads(text)
        listed = answer if isinstance(answer, list) else answer.get("value")
        body = {} if isinstance(answer, list) else answer.get("properties", answer)
        if body.get("nextLink") or (listed is not None and body.get("@nextLink")):
            raise UsageError(f"{source} is one page of several (nextLink is set): put the rows of all pages into one")
        if listed is not None:
            return _listed_rows(listed)
        return [str(column["name"]) for column in body["columns"]], list(body["rows"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{source} is neither the answer of a Cost Management query (columns, rows) nor a list of usage details: "
            f"{error!r}"
        ) from None


def _listed_rows(items: Sequence[Any]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of usage details: their fields, those of ``properties`` and those of ``meterDetails``."""
    flat = []
    for item in items:
        fields = dict(item) | dict(item.get("properties") or {})
        flat.append(fields | dict(fields.get("meterDetails") or {}))
    header = list(dict.fromkeys(name for fields in flat for name in fields))
    return header, [[fields.get(name) for name in header] for fields in flat]

"""The comparison of our figures with Azure's bill, by day and meter, with the reason for each difference. Pure.

Two shapes are read: the CSV of a cost details export (Enterprise and customer agreements name columns differently), and
the JSON answer of a Cost Management query. Days are UTC days in both. A row belongs to a job if its tags or additional
information name the job, or if its resource is a compute that a launch of it ran on, or has its cluster's tag; other
work there that day is included too, and the reason says so.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from dtrain_dagster.clusters.azure_ml.provision import CLUSTER_TAG
from dtrain_dagster.costs.meters import tier_of_meter
from dtrain_dagster.costs.money import HOUR, SECOND, USD, digits_of, shown
from dtrain_dagster.costs.tracker import CostTracker

COLUMNS = {
    "date": ("date", "usagedate", "usagedatetime"),
    "cost": ("costinbillingcurrency", "pretaxcost", "cost", "totalcost"),
    "currency": ("billingcurrency", "billingcurrencycode", "currency"),
    "meter": ("metercategory", "servicename"),
    "resource": ("resourceid", "instanceid", "instancename", "resource", "resourcename"),
    "tags": ("tags", "tag"),
    "name": ("metername", "meter"),
    "quantity": ("quantity", "usagequantity", "consumedquantity"),
    "unit": ("unitofmeasure",),
    "usd": ("costinusd", "costusd", "pretaxcostusd"),
    "info": ("additionalinfo", "additionalproperties"),
}
"""Names of each column in the two shapes, in lower case."""
NEEDED = ("date", "cost", "currency", "meter")
HOW = (
    "Export «Cost and usage details», or group the query by ResourceId, MeterCategory and Meter with daily granularity"
)
OTHER_METERS = {
    "storage": "disks and storage: no node-time, not in our figures",
    "bandwidth": "traffic: not in our figures",
    "virtual network": "network: not in our figures",
    "load balancer": "network: not in our figures",
    "virtual machines licenses": "licences: not in our figures",
}
NOT_OURS = "node-time of another SKU or tier than this job's, on the same compute"
NOT_YET = "not in the export: usage appears a day or two later; or the nodes are another subscription's"


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
    units: int
    """Billed amount in the units of `dtrain_dagster.costs.money`."""
    hours: float | None
    """Quantity, where its unit is hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The names and tags by which Azure knows a job."""

    job_id: str
    names: frozenset[str]
    """Names of its launches."""
    computes: frozenset[str]
    cluster: str = ""
    """Cluster in the tag of its computes, the only mark where a row's resource is the workspace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """One meter on one day. ``ours_usd`` is None for a meter that the project does not count."""

    day: str
    meter: str
    billed_usd: Decimal
    ours_usd: Decimal | None
    difference_usd: Decimal
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciliation:
    """The billed and the computed cost of a job, line by line."""

    rows: tuple[BillLine, ...]
    billed_usd: Decimal
    ours_usd: Decimal
    summary: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the reconciliation for JSON."""
        return {key: _plain(value) for key, value in asdict(self).items()}


def marks_of(job_id: str, launch: Mapping[str, Any]) -> Marks:
    """Return the marks of a job, from its ``launch.json``."""
    launches = [launch, *launch.get("history", ())]
    return Marks(
        job_id=job_id,
        names=frozenset(str(item["job_name"]).casefold() for item in launches if item.get("job_name")),
        computes=frozenset(str(item["compute"]).casefold() for item in launches if item.get("compute")),
        cluster=str(launch.get("cluster_name") or "").casefold(),
    )


def read_usage(text: str, source: str) -> list[BilledUsage]:
    """Return the rows of an export, in either shape. Raise `UsageError` where it is none, or not in US dollars."""
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
        return row[place] if place is not None and place < len(row) else ""

    found = []
    for number, row in enumerate(rows, 2):
        try:
            found.append(_usage({what: of(row, what) for what in COLUMNS}))
        except (ValueError, InvalidOperation, OverflowError) as error:
            raise UsageError(f"{source}, row {number}: {error}") from None
    return found


def reconcile(tracker: CostTracker, usage: Iterable[BilledUsage], marks: Marks) -> Reconciliation:
    """Return what was billed for the job on the days when it had nodes, beside our figures for them."""
    ours = _by_day(tracker)
    days = {day for day, _, _ in ours}
    billed: dict[tuple[date, str, str], list[BilledUsage]] = defaultdict(list)
    elsewhere, named, other_days = 0, True, 0
    for row in usage:
        by_name = _names_job(row, marks)
        if not by_name and not _is_on(row, marks):
            elsewhere += 1
        elif row.day not in days:
            other_days += 1
        else:
            named = named and by_name
            billed[row.day, row.meter, row.name].append(row)
    lines: list[tuple[date, str, int, int | None, str]] = []
    left = dict(ours)
    for (day, meter, name), rows in sorted(billed.items()):
        units, title = sum(row.units for row in rows), f"{meter}: {name}" if name else meter
        is_compute = _is_compute(rows)
        key = _key_of(rows, [key for key in left if key[0] == day]) if is_compute else None
        if key is None:
            why = NOT_OURS if is_compute else OTHER_METERS.get(meter.casefold(), "not in our figures")
            lines.append((day, title, units, None, why))
        else:
            mine, time, pieces = left.pop(key)
            lines.append((day, title, units, mine, _why(units, rows, mine, time, pieces, named)))
    lines += [(day, _title(sku, tier), 0, mine, NOT_YET) for (day, sku, tier), (mine, _, _) in left.items()]
    return _shown(sorted(lines, key=lambda line: line[:2]), elsewhere, other_days, named)


def _shown(
    lines: Sequence[tuple[date, str, int, int | None, str]], elsewhere: int, other_days: int, named: bool
) -> Reconciliation:  # fmt: skip
    digits = digits_of(max(sum(line[2] for line in lines), sum(line[3] or 0 for line in lines)))
    billed = shown([line[2] for line in lines], digits)
    ours = shown([line[3] or 0 for line in lines], digits)
    rows = tuple(
        BillLine(
            day=day.isoformat(),
            meter=meter,
            billed_usd=paid,
            ours_usd=counted if mine is not None else None,
            difference_usd=paid - counted,
            why=why,
        )
        for (day, meter, _, mine, why), paid, counted in zip(lines, billed, ours, strict=True)
    )
    whole, own = sum(billed, Decimal(0)), sum(ours, Decimal(0))
    summary = [f"billed ${whole:,}, ours ${own:,}: a difference of ${whole - own:+,}"]
    if lines and not any(line[2] for line in lines):
        summary.append("no row of the export is of this job: check its period, and that it has ResourceId or Tags")
    if not named:
        summary.append(
            "some rows are known by their compute alone: they hold whatever else was on it that day, idle nodes as well"
        )
    if other_days:
        summary.append(f"{other_days} row(s) of the same computes are of days on which this job had no node")
    if elsewhere:
        summary.append(f"{elsewhere} row(s) of the export are of something else")
    return Reconciliation(rows=rows, billed_usd=whole, ours_usd=own, summary=tuple(summary))


def _why(
    units: int, rows: Sequence[BilledUsage], mine: int, time: int, pieces: Sequence[int], named: bool
) -> str:  # fmt: skip
    """Return the reason for a difference on a meter of node-time: hours and price, each with its dollars."""
    known = [row.hours for row in rows if row.hours is not None]
    hours, own = sum(known), time / HOUR
    if not known or not own or not hours:
        return "the export does not say how many hours"
    listed, price = mine / own, units / hours
    said = []
    if abs(hours - own) >= 0.0005:
        rounded = sum(math.ceil(piece / HOUR) for piece in pieces)
        if abs(hours - rounded) < 1e-6:
            why = "rounded up to whole hours"
        elif hours > own:
            why = "nodes are billed while they boot, idle between jobs and are given back"
            why += "" if named else "; other jobs on the same compute"
        else:
            why = "not all of it is in the export yet, or the nodes were billed elsewhere"
        said.append(f"{hours:.3f} h billed, {own:.3f} h counted ({_signed((hours - own) * listed)}): {why}")
    if abs(price - listed) > 1e-4 * listed:
        said.append(
            f"${price / USD:.4f} an hour billed, list price ${listed / USD:.4f} ({_signed(hours * (price - listed))}): "
            "a discount, a reservation, or another tier"
        )
    return "; ".join(said) or "the same"


Key = tuple[date, str, str]
"""UTC day, SKU in small letters, tier."""


def _by_day(tracker: CostTracker) -> dict[Key, tuple[int, int, list[int]]]:
    """Return, by key, units, microseconds, and the microseconds of each presence of a node."""
    found: dict[Key, tuple[int, int, list[int]]] = {}
    for node in tracker.nodes:
        at = node.began
        while at < node.ended:
            day = datetime.fromtimestamp(at // SECOND, UTC).date()
            midnight = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
            end = min(node.ended, round(midnight.timestamp()) * SECOND)
            key = day, node.sku.casefold(), node.tier or "dedicated"
            units, time, pieces = found.get(key, (0, 0, []))
            span = end - at
            found[key] = units + span * node.nano_usd_per_hour, time + span, [*pieces, span]
            at = end
    return found


def _names_job(row: BilledUsage, marks: Marks) -> bool:
    words = f"{row.tags}\n{row.info}\n{row.resource}".casefold()
    return any(
        re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", words) for name in (marks.job_id.casefold(), *marks.names)
    )


def _is_on(row: BilledUsage, marks: Marks) -> bool:
    """Return whether the row's resource is a compute of the job, or one of the job's cluster."""
    parts = re.split(r"[/|]", row.resource.casefold())
    words = f"{row.tags}\n{row.info}".casefold()
    tag = rf'"{CLUSTER_TAG}"\s*:\s*"{re.escape(marks.cluster)}"'
    if marks.cluster and re.search(tag, words):
        return True
    return any(name in parts or re.search(rf'"{re.escape(name)}"', words) for name in marks.computes)


def _is_compute(rows: Sequence[BilledUsage]) -> bool:
    return rows[0].meter.casefold() in ("virtual machines", "azure machine learning", "") and any(
        row.hours is not None for row in rows
    )


def _key_of(rows: Sequence[BilledUsage], keys: Sequence[Key]) -> Key | None:
    """Return the key that a meter is of, by its additional information or its name («NC6s v3 Low Priority»). Another
    tier than the meter's only where there is no such node-time."""
    tier = tier_of_meter({"meterName": rows[0].name})
    for key in sorted(keys, key=lambda key: key[2] != tier):
        short = key[1].removeprefix("standard_").replace("_", " ")
        if any(key[1] in row.info.casefold() or short in row.name.casefold() for row in rows):
            return key
    return keys[0] if len(keys) == 1 and not any(row.info or row.name for row in rows) else None


def _title(sku: str, tier: str) -> str:
    return sku if tier == "dedicated" else f"{sku} ({tier.replace('_', ' ')})"


def _usage(row: Mapping[str, Any]) -> BilledUsage:
    currency = str(row["currency"]).strip().upper()
    cost = row["cost"]
    if currency != "USD":
        if row["usd"] in ("", None):
            raise ValueError(
                f"the currency is {currency or 'not given'}, ours are US dollars: export with the column CostInUsd, or "
                "query CostUSD"
            )
        cost = row["usd"]
    amount = Decimal(str(cost).strip() or "0")
    if not amount.is_finite():
        raise ValueError(f"a cost of {cost!r} is no number")
    is_hours = "hour" in str(row["unit"]).casefold() or not str(row["unit"]).strip()
    quantity = str(row["quantity"]).strip()
    return BilledUsage(
        day=_day(row["date"]),
        meter=str(row["meter"] or ""),
        name=str(row["name"] or ""),
        resource=str(row["resource"] or ""),
        tags=str(row["tags"] or ""),
        info=str(row["info"] or ""),
        units=round(amount * USD),
        hours=float(quantity) * _unit_size(str(row["unit"])) if quantity and is_hours else None,
    )


def _unit_size(unit: str) -> float:
    """Return the size of a unit: 10 for «10 Hours»."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)", unit)
    return float(found[1]) if found else 1.0


def _day(value: Any) -> date:
    """Return the date of 2026-06-01, 2026-06-01T00:00:00Z, 06/01/2026 or 20260601."""
    text = str(value).strip()
    for pattern in ("%Y-%m-%d", "%m/%d/%Y", "%Y%m%d"):
        try:
            return datetime.strptime(text[:10] if pattern != "%Y%m%d" else text[:8], pattern).date()  # noqa: DTZ007
        except ValueError:
            continue
    raise ValueError(f"{text!r} is no date; 2026-06-01, 06/01/2026 and 20260601 are")


def _csv_rows(text: str) -> tuple[list[str], list[list[str]]]:
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    return (rows[0], rows[1:]) if rows else ([], [])


def _json_rows(text: str, source: str) -> tuple[list[str], list[Any]]:
    try:
        answer = json.loads(text)
        body = answer.get("properties", answer)
        if body.get("nextLink"):
            raise UsageError(f"{source} is one page of several (nextLink is set): put the rows of all pages into one")
        return [str(column["name"]) for column in body["columns"]], list(body["rows"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{source} is no answer of a Cost Management query (columns, rows): {error!r}") from None


def _signed(units: float) -> str:
    return f"{'+' if units >= 0 else '−'}${abs(units) / USD:.4f}"


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

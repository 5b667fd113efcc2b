"""What Azure has billed for a job, beside our figures, by UTC day and meter, with the reason for each difference. Pure.

An export of cost details is read, CSV, in the classic columns (Enterprise and customer agreements name and write them
differently) or in those of FOCUS. Azure ML's nodes are billed with the *workspace* as their resource; the compute is in
the row's additional information, as PoolName ``<compute>_<guid>`` (users' reports of exports; Microsoft documents
neither). Every row is in the result with its dollars: compared, or with the reason why it is not.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

from dtrain_dagster.costs.meters import tier_of_meter
from dtrain_dagster.costs.money import HOUR, SECOND, USD, digits_of, shown
from dtrain_dagster.costs.tracker import CostTracker

COLUMNS = {
    "date": ("date", "chargeperiodstart"),
    "cost": ("costinbillingcurrency", "cost", "billedcost"),
    "currency": ("billingcurrency", "billingcurrencycode"),
    "meter": ("metercategory", "xskumetercategory", "servicename"),
    "resource": ("resourceid",),
    "name": ("metername", "xskumetername", "skumeter"),
    "quantity": ("quantity", "consumedquantity"),
    "unit": ("unitofmeasure", "consumedunit"),
    "usd": ("costinusd", "xbilledcostinusd"),
    "info": ("additionalinfo", "xskudetails", "skupricedetails"),
    "tags": ("tags",),
}
"""Names of each column in all schemas, their letters alone and small. The first that is there counts. As in
microsoft/finops-toolkit, EA_ActualCost_Small.csv, and learn.microsoft.com/cloud-computing/finops/focus/metadata."""
NEEDED = ("date", "cost", "currency", "meter", "resource")
NODE_METERS = ("virtual machines", "azure machine learning", "")
"""Categories of meters of node-time, those that surely are first."""
NOT_YET = "not in the export: usage appears a day or two later; or the nodes belong to another subscription"
COMPLETE_AFTER_DAYS = 2
"""Days after the end of a day until its usage is taken for complete. Azure documents 8 to 24 hours, and up to 72 for
some services."""
_WORKSPACE = re.compile(
    r"/subscriptions/([^/]+)/resourcegroups/([^/]+)/(?:providers/microsoft\.machinelearningservices/)?workspaces/"
    r"([^/?&#]+)"
)
Key = tuple[date, str, str]
"""UTC day, SKU in small letters, tier."""


class UsageError(ValueError):
    """The export cannot be used. The message names the file, what is wrong and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BilledUsage:
    """One row of an export. ``meter``: the category; ``pool``: "" where none is named; ``units``: of
    `dtrain_dagster.costs.money`; ``hours``: None for what is not billed by the hour."""

    day: date
    meter: str
    name: str
    resource: str
    tags: str
    pool: str
    size: str
    units: int
    hours: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The names by which Azure knows a job, its own and its launches'; its computes; its workspace, where known."""

    names: frozenset[str]
    computes: frozenset[str]
    workspace: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """One meter on one day. ``ours_usd`` is None for a meter that the project does not count; ``complete``: whether
    Azure has had the time to bill the whole day."""

    day: str
    meter: str
    billed_usd: Decimal
    ours_usd: Decimal | None
    difference_usd: Decimal
    why: str
    complete: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class UncomparedRows:
    """Rows of the export that are not compared, for one reason."""

    what: str
    rows: int
    billed_usd: Decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciliation:
    """The billed and the computed cost of a job, line by line, and the rows that are not compared."""

    rows: tuple[BillLine, ...]
    billed_usd: Decimal
    ours_usd: Decimal
    summary: tuple[str, ...]
    uncompared: tuple[UncomparedRows, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the reconciliation for JSON."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self), default=float))
        return found


def read_usage(data: bytes, source: str) -> list[BilledUsage]:
    """Return the rows of an export, compressed or not. Raise `UsageError` where it is none, or has no US dollars."""
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{source} cannot be decompressed ({error}): download it again") from None
    text = data.decode("utf-8-sig", errors="replace")
    rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    header = rows[0] if rows else []
    names = {re.sub(r"[^a-z]", "", name.lower()): place for place, name in reversed(list(enumerate(header)))}
    places = {what: next((names[name] for name in known if name in names), None) for what, known in COLUMNS.items()}
    if missing := [what for what in NEEDED if places[what] is None]:
        wanted = "; ".join(f"{what} ({' or '.join(COLUMNS[what])})" for what in missing)
        shown_header = ", ".join(header)[:500] or "none"
        raise UsageError(
            f"{source} has no column for {wanted}; it has {shown_header}. Export 'Cost and usage details' as CSV"
        )
    found = []
    for number, row in enumerate(rows[1:], 2):
        cells = {
            what: row[place].strip() if place is not None and place < len(row) else "" for what, place in places.items()
        }
        try:
            found.append(_usage(cells))
        except (ValueError, InvalidOperation, OverflowError) as error:
            raise UsageError(f"{source}, row {number}: {error}") from None
    return found


def _usage(row: Mapping[str, str]) -> BilledUsage:
    cost, known = row["cost"], fields_of(row["info"])
    if row["currency"].upper() != "USD":
        if not row["usd"]:
            raise ValueError(
                f"the currency is {row['currency'] or 'not given'}, ours are US dollars: export with the column "
                "CostInUsd or in the FOCUS schema (x_BilledCostInUsd)"
            )
        cost = row["usd"]
    amount, size_of_unit = Decimal(cost or "0"), re.match(r"\d+(?:\.\d+)?", row["unit"])
    if not amount.is_finite():
        raise ValueError(f"a cost of {cost!r} is not a number")
    is_hours = row["quantity"] and ("hour" in row["unit"].casefold() or not row["unit"])
    return BilledUsage(
        day=_day(row["date"]),
        meter=row["meter"],
        name=row["name"],
        resource=row["resource"],
        tags=row["tags"],
        pool=(known.get("poolname") or known.get("computetargetname") or "").casefold(),
        size=known.get("servicetype", "").casefold(),
        units=round(amount * USD),
        hours=float(row["quantity"]) * float(size_of_unit[0] if size_of_unit else 1) if is_hours else None,
    )


def fields_of(text: str) -> dict[str, str]:
    """Return the fields of additional information: a JSON object, with or without its braces (the classic schema of
    Enterprise Agreements leaves them away). Keys are in small letters, and without the ``x_`` of FOCUS 1.2. {} for
    anything else."""
    try:
        found = json.loads(text if text.startswith("{") else f"{{{text}}}")
    except ValueError:
        return {}
    known = {str(key).casefold().removeprefix("x_"): value for key, value in found.items()}
    return {key: str(value) for key, value in known.items() if value is not None}


def _day(text: str) -> date:
    for pattern, part in (("%Y-%m-%d", text[:10]), ("%m/%d/%Y", text.split(" ")[0])):
        try:
            return datetime.strptime(part, pattern).date()  # noqa: DTZ007
        except ValueError:
            continue
    raise ValueError(f"{text!r} is not a date; 2026-06-01 and 06/01/2026 are")


def marks_of(job_id: str, launch: Mapping[str, Any], workspace_id: str = "") -> Marks:
    """Return the marks of a job, from its ``launch.json``; ``workspace_id`` counts where that does not say where the
    job ran."""
    launches = [launch, *launch.get("history", ())]
    places = [workspace_of(unquote(str(item.get("studio_url") or ""))) for item in launches]
    names = [job_id, *(str(item["job_name"]) for item in launches if item.get("job_name"))]
    return Marks(
        names=frozenset(name.casefold() for name in names),
        computes=frozenset(str(item["compute"]).casefold() for item in launches if item.get("compute")),
        workspace=next((place for place in places if place), None) or workspace_of(workspace_id),
    )


def workspace_of(text: str) -> tuple[str, ...] | None:
    """Return subscription, resource group and name of the workspace of Azure ML that a resource id or an address of the
    studio names, in small letters; None for others. The studio leaves the provider away."""
    found = _WORKSPACE.search(text.casefold())
    return found.groups() if found else None


def why_not_compared(row: BilledUsage, marks: Marks) -> str:
    """Return why a row is not the job's: it neither names the job or a launch, nor is of a compute of it; "" if it is
    the job's."""
    if any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", row.tags.casefold()) for name in marks.names):
        return ""
    there, compute = workspace_of(row.resource), re.sub(r"_[0-9a-f-]{8,36}$", "", row.pool)
    if there is None or (marks.workspace and there != marks.workspace):
        return "something else"
    if not row.pool:
        return f"the workspace, without a compute: {row.meter or 'no meter'}"
    return "" if marks.computes & {compute, row.pool} else f"compute {compute}"


def reconcile(
    tracker: CostTracker, usage: Iterable[BilledUsage], marks: Marks, today: date | None = None
) -> Reconciliation:
    """Return what was billed for the job on the days when it had nodes, beside our figures for them. ``today``: UTC day
    by which a day is complete or not; None: all are."""
    ours = _by_day(tracker)
    days = {day for day, _, _ in ours}
    billed: dict[tuple[date, str, str], list[BilledUsage]] = defaultdict(list)
    others: dict[str, list[int]] = defaultdict(list)
    for row in usage:
        why = why_not_compared(row, marks)
        if not why and row.day not in days:
            why = "the same computes, on days on which this job had no node"
        if why:
            others[why].append(row.units)
        else:
            billed[row.day, row.meter, row.name].append(row)
    lines: list[tuple[date, str, int, int | None, str]] = []
    for (day, meter, name), group in sorted(billed.items(), key=lambda item: (item[0][0], _rank(item[0][1]), item[0])):
        units, key = sum(row.units for row in group), _key_of(group, [key for key in ours if key[0] == day])
        spans = ours.pop(key, None) if key else None
        mine = sum(units for units, _ in spans) if spans else None
        why = _why(units, group, spans) if spans else "not node-time of this job's SKU and tier: not in our figures"
        lines.append((day, f"{meter}: {name}" if name else meter, units, mine, why))
    lines += [
        (day, f"{sku} ({tier})", 0, sum(units for units, _ in spans), NOT_YET)
        for (day, sku, tier), spans in ours.items()
    ]
    return _shown(sorted(lines, key=lambda line: line[:2]), others, today)


def _rank(meter: str) -> int:
    """Return the place of a meter's category: node-time goes to machines before anything else may take it."""
    return NODE_METERS.index(meter.casefold()) if meter.casefold() in NODE_METERS else len(NODE_METERS)


def _key_of(rows: Sequence[BilledUsage], keys: Sequence[Key]) -> Key | None:
    """Return the key that a meter is of, by its size or its name (``NC6s v3 Spot``, ``D2 v3/D2s v3``). Another
    tier than the meter's only where there is no such node-time. None for a meter that is not of node-time."""
    name = rows[0].name.casefold()
    if rows[0].meter.casefold() not in NODE_METERS or "surcharge" in name or all(row.hours is None for row in rows):
        return None
    tier = tier_of_meter({"meterName": rows[0].name})
    for key in sorted(keys, key=lambda key: key[2] != tier):
        short = re.escape(key[1].removeprefix("standard_").replace("_", " "))
        if any(row.size == key[1] for row in rows) or re.search(rf"(?<![\w-]){short}(?![\w-])", name):
            return key
    return None


def _why(units: int, rows: Sequence[BilledUsage], spans: Sequence[tuple[int, int]]) -> str:
    """Return the reason for a difference on a meter of node-time: hours and price, each with its dollars. ``spans``:
    units and microseconds of each presence of a node."""
    hours, own = sum(row.hours or 0.0 for row in rows), sum(time for _, time in spans) / HOUR
    if not own or not hours:
        return "the export does not say how many hours"
    listed, price, said = sum(units for units, _ in spans) / own, units / hours, []
    if abs(hours - own) >= 0.0005:
        why = "not all of it is in the export yet, or the nodes were billed elsewhere"
        if abs(hours - sum(math.ceil(time / HOUR) for _, time in spans)) < 1e-6:
            why = "rounded up to whole hours"
        elif hours > own:
            why = "nodes are also billed while they boot, idle between jobs and shut down, as are other jobs on them"
        said.append(f"{hours:.3f} h billed, {own:.3f} h counted ({_signed((hours - own) * listed)}): {why}")
    if abs(price - listed) > 1e-4 * listed:
        said.append(
            f"${price / USD:.4f} an hour billed, list price ${listed / USD:.4f} ({_signed(hours * (price - listed))}): "
            "a discount, a reservation, or another tier"
        )
    return "; ".join(said) or "the same"


def _by_day(tracker: CostTracker) -> dict[Key, list[tuple[int, int]]]:
    """Return units and microseconds of each presence of a node by key."""
    found: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    for node in tracker.nodes:
        at = node.began
        while at < node.ended:
            day = datetime.fromtimestamp(at // SECOND, UTC)
            midnight = day.replace(hour=0, minute=0, second=0) + timedelta(days=1)
            end = min(node.ended, round(midnight.timestamp()) * SECOND)
            key = day.date(), node.sku.casefold(), node.tier or "dedicated"
            found[key].append(((end - at) * node.nano_usd_per_hour, end - at))
            at = end
    return dict(found)


def _shown(
    lines: Sequence[tuple[date, str, int, int | None, str]], others: Mapping[str, Sequence[int]], today: date | None
) -> Reconciliation:
    digits = digits_of(max(sum(line[2] for line in lines), sum(line[3] or 0 for line in lines)))
    billed, ours = shown([line[2] for line in lines], digits), shown([line[3] or 0 for line in lines], digits)
    rows = []
    for (day, meter, _, mine, why), paid, counted in zip(lines, billed, ours, strict=True):
        complete = today is None or today > day + timedelta(days=COMPLETE_AFTER_DAYS)
        rows.append(
            BillLine(
                day=day.isoformat(),
                meter=meter,
                billed_usd=paid,
                ours_usd=None if mine is None else counted,
                difference_usd=paid - counted,
                why=why if complete else f"this day is not complete yet; {why}",
                complete=complete,
            )
        )
    whole, own = sum(billed, Decimal(0)), sum(ours, Decimal(0))
    summary = [f"billed ${whole:,}, ours ${own:,}: a difference of ${whole - own:+,}"]
    if not any(line[2] for line in lines):
        summary.append("no row of the export belongs to this job: check its period, and that it has AdditionalInfo")
    if unfinished := [row.day for row in rows if not row.complete]:
        again = date.fromisoformat(unfinished[-1]) + timedelta(days=COMPLETE_AFTER_DAYS + 1)
        summary.append(f"{len(set(unfinished))} day(s) are not complete yet: export again on {again} or later")
    amounts = shown([sum(units) for units in others.values()], digits_of(sum(abs(sum(it)) for it in others.values())))
    left = sorted(
        (
            UncomparedRows(what=what, rows=len(units), billed_usd=usd)
            for (what, units), usd in zip(others.items(), amounts, strict=True)
        ),
        key=lambda item: (-item.billed_usd, item.what),
    )
    summary += [f"not compared: {item.rows} row(s), ${item.billed_usd:,}: {item.what}" for item in left]
    return Reconciliation(
        rows=tuple(rows), billed_usd=whole, ours_usd=own, summary=tuple(summary), uncompared=tuple(left)
    )


def _signed(units: float) -> str:
    return f"{'+' if units >= 0 else '−'}${abs(units) / USD:.4f}"

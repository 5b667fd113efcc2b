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
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from dtrain_dagster.costs.money import HOUR, SECOND, USD, digits_of, shown
from dtrain_dagster.costs.retail import tier_of_meter
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
WORKSPACES, MACHINES = "/providers/microsoft.machinelearningservices/workspaces/", "virtual machines"
NODE_METERS = (MACHINES, "azure machine learning", "")  # categories of meters of node-time
NOT_YET = "not in the export: usage appears a day or two later; or the nodes belong to another subscription"
NOT_OURS = "not node-time of this job's SKU and tier: not in our figures"
DAY = 24 * HOUR
Key = tuple[date, str, str]  # UTC day, SKU in small letters, tier


class UsageError(ValueError):
    """The export cannot be used. The message names the file, what is wrong and what to do."""


class BilledUsage:
    """One row of an export, of its cells by `COLUMNS`. ``meter``: the category; ``pool``: "" where none is named;
    ``units``: of `dtrain_dagster.costs.money`; ``hours``: None for what is not billed by the hour. Raise `ValueError`,
    also as `InvalidOperation` and `OverflowError`, for a row without a date or without a cost in US dollars."""

    def __init__(self, row: Mapping[str, str]) -> None:
        known, is_iso, is_usd = fields_of(row["info"]), "-" in row["date"], row["currency"].upper() == "USD"
        if not is_usd and not row["usd"]:
            raise ValueError(
                f"the currency is {row['currency'] or 'not given'}, ours are US dollars: export with the column "
                "CostInUsd or in the FOCUS schema (x_BilledCostInUsd)"
            )
        day = datetime.strptime(row["date"].split(" ")[0][:10], "%Y-%m-%d" if is_iso else "%m/%d/%Y")  # noqa: DTZ007
        self.day, self.meter, self.name = day.date(), row["meter"], row["name"]
        self.units = round(Decimal(row["cost" if is_usd else "usd"] or "0") * USD)
        self.resource, self.tags = row["resource"].casefold(), row["tags"].casefold()
        self.pool = (known.get("poolname") or known.get("computetargetname") or "").casefold()
        self.size = known.get("servicetype", "").casefold()
        is_hours = row["quantity"] and ("hour" in row["unit"].casefold() or not row["unit"])
        count = re.match(r"\d+(?:\.\d+)?", row["unit"])
        self.hours = float(row["quantity"]) * float(count[0] if count else 1) if is_hours else None


class Marks:
    """The names by which Azure knows a job, its own and its launches'; its computes; the resource id of its workspace,
    "" where that is not known. All in small letters. ``launch``: ``launch.json``."""

    def __init__(self, job_id: str, launch: Mapping[str, Any], workspace_id: str = "") -> None:
        launches = [launch, *launch.get("history", ())]
        self.names = {job_id.casefold(), *(str(item.get("job_name") or job_id).casefold() for item in launches)}
        self.computes = {str(item["compute"]).casefold() for item in launches if item.get("compute")}
        self.workspace = workspace_id.casefold()

    def why_not(self, row: BilledUsage) -> str:
        """Return why a row is not the job's: it neither names the job or a launch, nor is of a compute of it; "" if it
        is the job's."""
        if any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", row.tags) for name in self.names):
            return ""
        if WORKSPACES not in row.resource or (self.workspace and row.resource != self.workspace):
            return "something else"
        if not row.pool:
            return f"the workspace, without a compute: {row.meter or 'no meter'}"
        compute = re.sub(r"_[0-9a-f-]{8,36}$", "", row.pool)
        return "" if self.computes & {compute, row.pool} else f"compute {compute}"


@dataclass(frozen=True, slots=True)
class BillLine:
    """One meter on one day. ``ours_usd`` is None for a meter that the project does not count."""

    day: str
    meter: str
    billed_usd: Decimal
    ours_usd: Decimal | None
    difference_usd: Decimal
    why: str


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The billed and the computed cost of a job, line by line. ``uncompared``: for each reason why rows of the export
    are not compared, ``what``, how many ``rows`` and their ``billed_usd``."""

    rows: tuple[BillLine, ...]
    billed_usd: Decimal
    ours_usd: Decimal
    summary: tuple[str, ...]
    uncompared: tuple[dict[str, Any], ...]


def read_usage(data: bytes, source: str) -> list[BilledUsage]:
    """Return the rows of an export, compressed or not. Raise `UsageError` where it is none, or has no US dollars."""
    try:
        text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode("utf-8-sig", errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{source} cannot be decompressed ({error}): download it again") from None
    table = csv.DictReader(io.StringIO(text.lstrip()))
    named = {re.sub(r"[^a-z]", "", name.lower()): name for name in reversed(table.fieldnames or ())}
    columns = {what: next((named[name] for name in known if name in named), "") for what, known in COLUMNS.items()}
    if missing := [f"{what} ({' or '.join(COLUMNS[what])})" for what in NEEDED if not columns[what]]:
        has = f"it has {', '.join(table.fieldnames or ())[:500] or 'none'}. Export 'Cost and usage details' as CSV"
        raise UsageError(f"{source} has no column for {'; '.join(missing)}; {has}")
    found = []
    for number, row in enumerate(table, 2):
        cells = {what: (row.get(name) or "").strip() if name else "" for what, name in columns.items()}
        if not any(cells.values()):
            continue
        try:
            found.append(BilledUsage(cells))
        except (ValueError, InvalidOperation, OverflowError) as error:
            raise UsageError(f"{source}, row {number}: {error}") from None
    return found


def fields_of(text: str) -> dict[str, str]:
    """Return the fields of additional information: a JSON object, with or without its braces (the classic schema of
    Enterprise Agreements leaves them away). Keys are in small letters, and without the ``x_`` of FOCUS 1.2. {} for
    anything else."""
    try:
        found = json.loads(text if text.startswith("{") else f"{{{text}}}")
    except ValueError:
        return {}
    return {str(key).casefold().removeprefix("x_"): str(value) for key, value in found.items() if value is not None}


def reconcile(tracker: CostTracker, usage: Iterable[BilledUsage], marks: Marks) -> Reconciliation:
    """Return what was billed for the job on the days when it had nodes, beside our figures for them."""
    ours = _by_day(tracker)
    days = {day for day, _, _ in ours}
    billed: dict[tuple[date, bool, str, str], list[BilledUsage]] = defaultdict(list)
    others: dict[str, list[int]] = defaultdict(list)
    for row in usage:
        why = marks.why_not(row)
        if why or row.day not in days:
            others[why or "the same computes, on days on which this job had no node"].append(row.units)
        else:  # machines first: they take the node-time that Azure ML's own meters, of the same hours, name as well
            billed[row.day, row.meter.casefold() != MACHINES, row.meter, row.name].append(row)
    lines: list[tuple[date, str, int, int | None, str]] = []
    for (day, _, meter, name), group in sorted(billed.items()):
        key, units = next((key for key in ours if _is_of(group, key)), None), sum(row.units for row in group)
        spans = ours.pop(key) if key else ()
        why, mine = (_why(units, group, spans), sum(own for own, _ in spans)) if spans else (NOT_OURS, None)
        lines.append((day, f"{meter}: {name}" if name else meter, units, mine, why))
    for (day, sku, tier), spans in ours.items():
        lines.append((day, f"{sku} ({tier})", 0, sum(own for own, _ in spans), NOT_YET))
    lines.sort(key=lambda line: line[:2])

    digits = digits_of(max(sum(line[2] for line in lines), sum(line[3] or 0 for line in lines)))
    paid, own = shown([line[2] for line in lines], digits), shown([line[3] or 0 for line in lines], digits)
    rows = tuple(
        BillLine(str(day), meter, usd, None if mine is None else counted, usd - counted, why)
        for (day, meter, _, mine, why), usd, counted in zip(lines, paid, own, strict=True)
    )
    whole, whole_own = sum(paid, Decimal(0)), sum(own, Decimal(0))
    summary = [f"billed ${whole:,}, ours ${whole_own:,}: a difference of ${whole - whole_own:+,}"]
    if not billed:
        summary.append("no row of the export belongs to this job: check its period, and that it has AdditionalInfo")
    amounts = shown([sum(units) for units in others.values()], digits)
    left: list[dict[str, Any]] = [
        {"what": what, "rows": len(others[what]), "billed_usd": usd}
        for usd, what in sorted(zip(amounts, others, strict=True), reverse=True)
    ]
    summary += [f"not compared: {item['rows']} row(s), ${item['billed_usd']:,}: {item['what']}" for item in left]
    return Reconciliation(rows, whole, whole_own, tuple(summary), tuple(left))


def _is_of(rows: Sequence[BilledUsage], key: Key) -> bool:
    """Return whether a meter is of this node-time, by its size or its name (``NC6s v3 Spot``, ``D2 v3/D2s v3``)."""
    name, (day, sku, tier) = rows[0].name.casefold(), key
    if rows[0].meter.casefold() not in NODE_METERS or "surcharge" in name or all(row.hours is None for row in rows):
        return False
    short = re.escape(sku.removeprefix("standard_").replace("_", " "))
    is_size = any(row.size == sku for row in rows) or bool(re.search(rf"(?<![\w-]){short}(?![\w-])", name))
    return is_size and (rows[0].day, tier_of_meter({"meterName": rows[0].name})) == (day, tier)


def _why(units: int, rows: Sequence[BilledUsage], spans: Sequence[tuple[int, int]]) -> str:
    """Return the reason for a difference on a meter of node-time: its hours, its price. ``spans``: units and
    microseconds of each presence of a node."""
    hours, own = sum(row.hours or 0.0 for row in rows), sum(time for _, time in spans) / HOUR
    if not own or not hours:
        return "the export does not say how many hours"
    listed, price, said = sum(units for units, _ in spans) / own / USD, units / hours / USD, []
    if abs(hours - own) >= 0.0005:
        more = "hours are rounded up, and nodes are also billed while they boot, idle, shut down or do other jobs"
        less = "not all of it is in the export yet, or the nodes were billed elsewhere"
        said.append(f"{hours:.3f} h billed, {own:.3f} h counted: {more if hours > own else less}")
    if abs(price - listed) > 1e-4 * listed:
        why = "a discount, a reservation, or another tier"
        said.append(f"${price:.4f} an hour billed, list price ${listed:.4f}: {why}")
    return "; ".join(said) or "the same"


def _by_day(tracker: CostTracker) -> dict[Key, list[tuple[int, int]]]:
    """Return units and microseconds of each presence of a node by key."""
    found: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    for node in tracker.nodes:
        at = node.began
        while at < node.ended:
            end = min(node.ended, (at // DAY + 1) * DAY)
            key = datetime.fromtimestamp(at // SECOND, UTC).date(), node.sku.casefold(), node.tier or "dedicated"
            found[key].append(((end - at) * node.nano_usd_per_hour, end - at))
            at = end
    return dict(found)

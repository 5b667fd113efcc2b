"""The comparison of our figures with Azure's bill, by day and meter, with the reason for each difference. Pure.

Rows come from `bill_rows` beside this module; `bill_matching` says whose each is. Every row is in the result with its
dollars: compared, or with the reason why it is not.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from dtrain_dagster.clusters.azure_ml.bill_matching import Marks, belonging_of, compute_of_pool, workspace_of
from dtrain_dagster.clusters.azure_ml.bill_rows import BilledUsage, Repeats, drop_repeats
from dtrain_dagster.costs.meters import tier_of_meter
from dtrain_dagster.costs.money import HOUR, SECOND, USD, digits_of, shown
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.settings.tiers import tier_in_words

OTHER_METERS = {
    "storage": "disks and storage: no node-time, not in our figures",
    "bandwidth": "traffic: not in our figures",
    "virtual network": "network: not in our figures",
    "load balancer": "network: not in our figures",
    "virtual machines licenses": "licences: not in our figures",
}
NODE_METERS = ("virtual machines", "azure machine learning", "")
"""Categories of meters of node-time, those that surely are first."""
NOT_OURS = "node-time of another SKU or tier than this job's, on the same compute"
SURCHARGE = "a surcharge on node-time: not in our figures"
NOT_YET = "not in the export: usage appears a day or two later; or the nodes belong to another subscription"
COMPLETE_AFTER_DAYS = 2
"""Days after the end of a day until its usage is taken for complete. Azure documents 8 to 24 hours, and up to 72 for
some services."""
NO_INFO = "no AdditionalInfo, which names it: export cost details, since a Cost Management query does not have it"
UNFINISHED = "this day is not complete yet"


Key = tuple[date, str, str]
"""UTC day, SKU in small letters, tier."""
Own = tuple[int, int, list[int]]
"""Our figures: units, microseconds, and the microseconds of each presence of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """One meter on one day. ``ours_usd`` is None for a meter that the project does not count."""

    day: str
    meter: str
    billed_usd: Decimal
    ours_usd: Decimal | None
    difference_usd: Decimal
    why: str
    complete: bool = True
    """Whether Azure has had the time to bill the whole day."""


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
    uncompared: tuple[UncomparedRows, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the reconciliation for JSON."""
        return {key: _plain(value) for key, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    day: date
    meter: str
    units: int
    mine: int | None
    why: str


def reconcile(
    tracker: CostTracker, usage: Iterable[BilledUsage], marks: Marks, today: date | None = None
) -> Reconciliation:  # fmt: skip
    """Return what was billed for the job on the days when it had nodes, beside our figures for them. ``today``: UTC day
    by which a day is complete or not; None: all are."""
    ours = _by_day(tracker)
    rows, repeats = drop_repeats(usage)
    mine, named, others = _sorted_out(rows, marks, {day for day, _, _ in ours})
    if repeats.dropped:
        others["repetitions of whole days, as re-runs of an export write them"] += repeats.dropped
    lines = _compared(mine, ours, named)
    return _shown(
        sorted(lines, key=lambda line: (line.day, line.meter)), others, _notes(mine, named, repeats, marks), today
    )


def is_complete(day: date, today: date | None) -> bool:
    """Return whether Azure has had the time to bill all of that UTC day."""
    return today is None or today > day + timedelta(days=COMPLETE_AFTER_DAYS)


def _sorted_out(
    rows: Iterable[BilledUsage], marks: Marks, days: set[date]
) -> tuple[list[BilledUsage], bool, dict[str, list[BilledUsage]]]:
    """Return the rows to compare, whether all of them name the job, and the others by the reason why they are not."""
    mine, named = [], True
    others: dict[str, list[BilledUsage]] = defaultdict(list)
    for row in rows:
        whose = belonging_of(row, marks)
        if whose == "other_compute":
            others[f"compute {compute_of_pool(row.pool)} of the same workspace"].append(row)
        elif whose == "workspace":
            why = f" ({NO_INFO})" if not row.info and row.meter.casefold() in NODE_METERS else ""
            others[f"the same workspace, without a compute: {row.meter or 'no meter'}{why}"].append(row)
        elif whose == "elsewhere":
            others["something else"].append(row)
        elif row.day not in days:
            others["the same computes, on days on which this job had no node"].append(row)
        else:
            named = named and whose == "job"
            mine.append(row)
    return mine, named, others


def _compared(rows: Sequence[BilledUsage], ours: Mapping[Key, Own], named: bool) -> list[_Line]:
    """Return a line for each meter of each day, and one for all node-time of ours that no meter has."""
    billed: dict[tuple[date, str, str], list[BilledUsage]] = defaultdict(list)
    for row in rows:
        billed[row.day, row.meter, row.name].append(row)
    lines, left = [], dict(ours)
    for (day, meter, name), group in sorted(billed.items(), key=lambda item: (item[0][0], _rank(item[0][1]), item[0])):
        units, title = sum(row.units for row in group), f"{meter}: {name}" if name else meter
        key = _key_of(group, [key for key in left if key[0] == day]) if _is_node_time(group) else None
        if key is None:
            lines.append(_Line(day=day, meter=title, units=units, mine=None, why=_why_not_ours(group)))
        else:
            mine, time, pieces = left.pop(key)
            why = _why(units, group, mine, time, pieces, named)
            lines.append(_Line(day=day, meter=title, units=units, mine=mine, why=why))
    return lines + [
        _Line(day=day, meter=_title(sku, tier), units=0, mine=mine, why=NOT_YET)
        for (day, sku, tier), (mine, _, _) in left.items()
    ]


def _notes(rows: Sequence[BilledUsage], named: bool, repeats: Repeats, marks: Marks) -> list[str]:
    """Return what has to be known of the compared rows."""
    notes = []
    if not rows:
        notes.append(
            "no row of the export belongs to this job: check its period, and that it has ResourceId with "
            "AdditionalInfo, or Tags"
        )
    if not named:
        notes.append(
            "some rows are identified only by their compute: they include whatever else was on it that day, and idle "
            "nodes as well"
        )
    places = {place for row in rows if (place := workspace_of(row.resource))}
    if marks.workspace is None and len(places) > 1:
        notes.append(
            f"{len(places)} workspaces have a compute of this name, and it is not known in which one the job ran: "
            "their rows are added up"
        )
    if doubtful := [row for row in repeats.doubtful if row in rows]:
        units = sum(row.units for row in doubtful)
        notes.append(
            f"{len(doubtful)} row(s) of ${units / USD:.4f} repeat another one and are counted: two nodes with equal "
            "hours, or an export that ran twice"
        )
    return notes


def _shown(
    lines: Sequence[_Line], others: Mapping[str, Sequence[BilledUsage]], notes: Sequence[str], today: date | None
) -> Reconciliation:  # fmt: skip
    digits = digits_of(max(sum(line.units for line in lines), sum(line.mine or 0 for line in lines)))
    billed = shown([line.units for line in lines], digits)
    ours = shown([line.mine or 0 for line in lines], digits)
    rows = tuple(
        BillLine(
            day=line.day.isoformat(),
            meter=line.meter,
            billed_usd=paid,
            ours_usd=counted if line.mine is not None else None,
            difference_usd=paid - counted,
            why=line.why if is_complete(line.day, today) else f"{UNFINISHED}; {line.why}",
            complete=is_complete(line.day, today),
        )
        for line, paid, counted in zip(lines, billed, ours, strict=True)
    )
    whole, own = sum(billed, Decimal(0)), sum(ours, Decimal(0))
    summary = [f"billed ${whole:,}, ours ${own:,}: a difference of ${whole - own:+,}", *notes]
    if unfinished := [row for row in rows if not row.complete]:
        paid = sum((row.billed_usd for row in unfinished), Decimal(0))
        counted = sum((row.ours_usd or Decimal(0) for row in unfinished), Decimal(0))
        again = date.fromisoformat(unfinished[-1].day) + timedelta(days=COMPLETE_AFTER_DAYS + 1)
        summary.append(
            f"{len({row.day for row in unfinished})} day(s) are not complete yet, with ${paid:,} billed and "
            f"${counted:,} of ours: export again on {again} or later"
        )
    left = _uncompared(others)
    summary += [f"not compared: {item.rows} row(s), ${item.billed_usd:,}: {item.what}" for item in left]
    return Reconciliation(rows=rows, billed_usd=whole, ours_usd=own, summary=tuple(summary), uncompared=left)


def _uncompared(others: Mapping[str, Sequence[BilledUsage]]) -> tuple[UncomparedRows, ...]:
    """Return the rows that are not compared, the most expensive reason first."""
    sums = sorted(
        ((sum(row.units for row in rows), what) for what, rows in others.items()), key=lambda it: (-it[0], it[1])
    )
    amounts = shown([units for units, _ in sums], digits_of(sum(abs(units) for units, _ in sums)))
    return tuple(
        UncomparedRows(what=what, rows=len(others[what]), billed_usd=usd)
        for (_, what), usd in zip(sums, amounts, strict=True)
    )


def _rank(meter: str) -> int:
    """Return the place of a meter's category: node-time goes to machines before anything else may take it."""
    return NODE_METERS.index(meter.casefold()) if meter.casefold() in NODE_METERS else len(NODE_METERS)


def _is_node_time(rows: Sequence[BilledUsage]) -> bool:
    is_surcharge = "surcharge" in rows[0].name.casefold()
    return rows[0].meter.casefold() in NODE_METERS and not is_surcharge and any(row.hours is not None for row in rows)


def _why_not_ours(rows: Sequence[BilledUsage]) -> str:
    if "surcharge" in rows[0].name.casefold():
        return SURCHARGE
    return NOT_OURS if _is_node_time(rows) else OTHER_METERS.get(rows[0].meter.casefold(), "not in our figures")


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
            why = "nodes are also billed while they boot, idle between jobs and shut down"
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


def _by_day(tracker: CostTracker) -> dict[Key, Own]:
    """Return our figures by key."""
    found: dict[Key, Own] = {}
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


def _key_of(rows: Sequence[BilledUsage], keys: Sequence[Key]) -> Key | None:
    """Return the key that a meter is of, by its size or its name (``NC6s v3 Spot``, ``D2 v3/D2s v3``). Another
    tier than the meter's only where there is no such node-time."""
    tier = tier_of_meter({"meterName": rows[0].name})
    for key in sorted(keys, key=lambda key: key[2] != tier):
        short = key[1].removeprefix("standard_").replace("_", " ")
        is_named = re.search(rf"(?<![\w-]){re.escape(short)}(?![\w-])", rows[0].name.casefold())
        if any(row.size == key[1] for row in rows) or is_named:
            return key
    return keys[0] if len(keys) == 1 and not any(row.size or row.name for row in rows) else None


def _title(sku: str, tier: str) -> str:
    return sku if tier == "dedicated" else f"{sku} ({tier_in_words(tier)})"


def _signed(units: float) -> str:
    return f"{'+' if units >= 0 else '−'}${abs(units) / USD:.4f}"


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

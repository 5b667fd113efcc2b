"""The bill and its ledger as rows and JSON. In each table, dollars sum to the bill to the last digit shown."""

from __future__ import annotations

from dataclasses import asdict
from decimal import Decimal
from typing import Any

from dtrain_dagster.costs.ledger import Ledger
from dtrain_dagster.costs.money import SECOND, shown, total_shown
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostMetrics, CostTracker, utc

DIGITS = 6
Rows = list[dict[str, Any]]


def node_rows(tracker: CostTracker, digits: int = DIGITS) -> Rows:
    amounts = shown([node.units for node in tracker.nodes], digits)
    return [
        {
            "node": node.node_id,
            "purpose": "probe" if node.is_probe else "training",
            "sku": node.sku,
            "tier": node.tier or "",
            "from_utc": utc(node.began),
            "to_utc": utc(node.ended),
            "seconds": _seconds(node.microseconds),
            "usd_per_hour": Decimal(node.nano_usd_per_hour).scaleb(-9).quantize(Decimal("0.000001")),
            "usd": usd,
        }
        for node, usd in zip(tracker.nodes, amounts, strict=True)
    ]


def ledger_rows(found: Ledger, digits: int = DIGITS) -> Rows:
    causes = found.causes()
    amounts = shown([row.units for row in causes.values()], digits)
    percents = shown([row.microseconds * 100 for row in causes.values()], 1, unit=max(1, found.microseconds))
    return [
        {
            "cause": str(cause),
            "node_seconds": _seconds(row.microseconds),
            "percent": percent,
            "usd": usd,
            "meaning": cause.meaning,
        }
        for (cause, row), usd, percent in zip(causes.items(), amounts, percents, strict=True)
    ]


def cost_document(tracker: CostTracker, found: Ledger, metrics: CostMetrics, price: str, **more: Any) -> dict[str, Any]:
    """Return all of the bill for ``json``. Figures are numbers, as JSON has them."""
    return {
        "metrics": asdict(metrics),
        "total_usd": float(total_shown([tracker.total_units], DIGITS)),
        "training_usd": round(tracker.training_usd, DIGITS),
        "probe_usd": round(tracker.probe_usd, DIGITS),
        "price": price,
        "nodes": plain(node_rows(tracker)),
        "ledger": plain(ledger_rows(found)),
        "goodput": None if CostCause.SCRIPT in found.causes() else found.goodput,
        "notes": [*tracker.notes, *found.notes],
        **more,
    }


def plain(rows: Rows) -> Rows:
    return [{key: float(value) if isinstance(value, Decimal) else value for key, value in row.items()} for row in rows]


def _seconds(microseconds: int) -> Decimal:
    return (Decimal(microseconds) / SECOND).quantize(Decimal("0.000001"))

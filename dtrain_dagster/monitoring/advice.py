"""Does a job cost too much? Pure functions from facts to a value."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain_dagster.costs.tracker import overrun


@dataclass(frozen=True, kw_only=True, slots=True)
class OverrunDecision:
    fraction: float
    """Cost so far above the estimate: 0.25 is 25 % too much."""
    alert: bool
    advice: str


def decide_overrun(actual_usd: float, estimated_usd: float, node_count: int, limit_fraction: float) -> OverrunDecision:
    """Does a running job cost more than the estimate allows (R5.4), and what can be done about it?"""
    fraction = overrun(actual_usd, estimated_usd)
    advice = "let it finish if the result is worth it, or terminate the run: the checkpoint stays"
    if node_count > 1:
        advice += "; for the next run fewer nodes (DTRAIN_NODES) cost less wherever communication is what they wait for"
    return OverrunDecision(fraction=fraction, alert=fraction > limit_fraction, advice=advice)

"""The time for which a node was paid: the one fact that every cluster hands to the cost accounting.

It stands below both, so that costs need no cluster and clusters need no cost accounting. The cost of an interval is
computed in `costs.tracker`; how a cluster finds out when its nodes were present belongs to the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUsage:
    """An interval of paid presence of one node. Times are Unix seconds."""

    node_id: int
    sku: str
    started_at: float
    ended_at: float
    tier: str | None = None
    """Tier that was paid for, where the cluster decides; None: the tier that was requested."""
    launch: int = 1
    not_billed_seconds: float = 0.0
    """Seconds that the node's record has beyond this since its clock was set: negative where it was set back."""

    preflight_until: float | None = None
    """Until when its pre-flight took, from ``started_at`` on; None where none was made."""
    kept_since: float | None = None
    """Since when it stayed for a person to look at, its ranks ended; None where it did not."""
    is_probe: bool = False
    """Whether the node worked for a probe that the training's plan rests on, see `dtrain_dagster.costs.plan`."""

    @property
    def hours(self) -> float:
        return (self.ended_at - self.started_at) / 3600

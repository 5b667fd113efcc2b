"""How long a node was paid for: the one fact that every cluster hands to the cost accounting.

It stands below both, so that costs need no cluster and clusters need no cost accounting. What a stay costs is computed
in `costs.tracker`; how a cluster finds out when its nodes were there belongs to the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUsage:
    """One stretch of paid presence of one node. Times are Unix seconds."""

    node_id: int
    sku: str
    started_at: float
    ended_at: float
    tier: str | None = None
    """Tier that was paid for, where the cluster decides; None: the one that was asked for."""
    not_billed_seconds: float = 0.0
    """What the node's record has, or would have, on top of this, since its clock was set: negative where back."""

    @property
    def hours(self) -> float:
        return (self.ended_at - self.started_at) / 3600

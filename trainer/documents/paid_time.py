"""The node-seconds that a job was paid for, from the presence of its nodes, and how many it may be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.documents.presences import NodePresence


@dataclass(frozen=True, slots=True)
class Paid:
    """The node-seconds paid at a moment, and the number of nodes that are being paid for."""

    node_seconds: float
    nodes: int

    def after(self, seconds: float) -> float:
        """Return the node-seconds paid this many seconds later, if no node comes or goes."""
        return self.node_seconds + self.nodes * max(0.0, seconds)


def sum_paid(nodes: Iterable[NodePresence], launch: int, now: float, stale: float) -> Paid:
    """Return the node-seconds over all nodes of all launches. A node of ``launch``, the present one, counts up to
    ``now`` if it has not ended and was heard of within ``stale`` seconds; any other without an end counts until it was
    last heard of."""
    total, here = 0.0, 0
    for node in nodes:
        heard = node.heard_at(now)
        is_here = node.launch == launch and node.ended_at is None and now - heard < stale
        here += is_here
        seen = node.last_seen_at or node.started_at
        total += node.seconds(seen + max(0.0, now - heard) if is_here else seen)
    return Paid(total, here)


def limit_of(document: Any, default: float) -> float:
    """Return the node-seconds that ``budget.json`` allows, infinite where it sets no limit; ``default`` where there is
    no such file. Raise ValueError for one that is damaged."""
    if document is None:
        return default
    found = document.get("max_node_seconds", "missing") if isinstance(document, dict) else "missing"
    if found is None:
        return math.inf
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f"max_node_seconds is {found!r}, not a number above 0")
    return float(found)

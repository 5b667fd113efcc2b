"""When nodes were there, as their presences in the run directory tell: which count now, how they are, when they ended.

A presence is written by the supervisor, and what it says is paid for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dtrain_dagster.clusters.base import NodeHealth, NodeUsage
from trainer.rundir import NodePresence, RunDir

HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 5 * HEARTBEAT_SECONDS


def latest(nodes: Iterable[NodePresence]) -> list[NodePresence]:
    """Of each node of the last launch, the last stay."""
    nodes = list(nodes)
    number = max((node.launch for node in nodes), default=0)
    newest: dict[int, NodePresence] = {}
    for node in nodes:
        if node.launch == number and (node.node_id not in newest or node.stay > newest[node.node_id].stay):
            newest[node.node_id] = node
    return list(newest.values())


def end_of(node: NodePresence) -> float:
    """When a node ended; for one whose supervisor died, when it was last seen."""
    return node.ended_at or node.last_seen_at or node.started_at


def usage(nodes: Sequence[NodePresence], sku: str, running: bool, now: float) -> list[NodeUsage]:
    """Every stay as paid time; if the job is ``running``, a node that is still there counts until now."""
    here = set(latest(nodes)) if running else set()
    return [
        NodeUsage(
            node_id=node.node_id,
            sku=sku,
            started_at=node.started_at,
            ended_at=now if node in here and node.ended_at is None else end_of(node),
        )
        for node in nodes
    ]


def health(job_id: str, node: NodePresence, now: float) -> NodeHealth:
    """How a node of a running job is."""
    if node.ended_at is not None:
        left = f"left {job_id} with exit codes {', '.join(map(str, node.exit_codes))}"
        return NodeHealth(node_id=node.node_id, healthy=not any(node.exit_codes), message=left)
    silent = now - (node.last_seen_at or node.started_at)
    if silent > STALE_SECONDS:
        return NodeHealth(node_id=node.node_id, healthy=False, message=f"silent for {silent:.0f} s in {job_id}")
    stay = f", in the place of one that was lost (stay {node.stay})" if node.stay > 1 else ""
    return NodeHealth(node_id=node.node_id, healthy=True, message=f"works on {job_id}{stay}")


def close(rundir: RunDir, ended_at: float | None = None) -> None:
    """Write the end of nodes whose supervisor could not: at this time, or when they were last seen."""
    for node in rundir.nodes():
        if node.ended_at is None:
            rundir.write_node(replace(node, ended_at=end_of(node) if ended_at is None else ended_at))

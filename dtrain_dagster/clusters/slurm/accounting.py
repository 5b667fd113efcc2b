"""SLURM's account of a job's nodes, held against their own presence. Pure: `engine` runs the command, and
`dtrain cost` shows the result.

The two begin and end at different moments: SLURM counts from the start of the batch script, and until all of it is
cleaned up; a presence from the start of the agent to the end of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtrain_dagster.clusters.presence import end_of
from dtrain_dagster.clusters.slurm.commands import ACCOUNTED
from dtrain_dagster.clusters.supervision.engine import name_job
from trainer.documents.presences import NodePresence


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountedNode:
    """One incarnation of a node, by both accounts."""

    launch: int
    node_id: int
    incarnation: int
    present_seconds: float
    """Seconds of its presence; what costs are computed from."""
    accounted_seconds: float | None
    """SLURM's seconds; None where its accounting has no such job."""
    state: str = ""
    """How it ended, in SLURM's word."""
    partition: str = ""
    """Where it ran; "" where SLURM's accounting has no such job."""

    @property
    def difference(self) -> float | None:
        """Return SLURM's seconds minus those of the presence; None where SLURM has none."""
        return None if self.accounted_seconds is None else self.accounted_seconds - self.present_seconds


class AccountedJob(NamedTuple):
    """One job, as SLURM accounts it."""

    seconds: float
    state: str
    partition: str


def read_account(text: str) -> dict[str, AccountedJob]:
    """Return name of a job → its account, from what sacct prints. A job that was accounted twice counts twice."""
    found: dict[str, AccountedJob] = {}
    for line in text.splitlines():
        row = dict(zip(ACCOUNTED, line.split("|"), strict=False))
        if len(row) == len(ACCOUNTED) and row["ElapsedRaw"].isdigit():
            before = found[row["JobName"]].seconds if row["JobName"] in found else 0.0
            found[row["JobName"]] = AccountedJob(
                before + float(row["ElapsedRaw"]), row["State"].split()[0], row["Partition"]
            )
    return found


def names_of(launch: Mapping[str, Any], presences: Iterable[NodePresence]) -> dict[NodePresence, str]:
    """Return presence → the name of its job in SLURM. ``launch``: as in ``launch.json``."""
    return {node: name_job({**launch, "launch": node.launch}, node.node_id, node.incarnation) for node in presences}


def compare_accounts(
    names: Mapping[NodePresence, str], account: Mapping[str, AccountedJob], now: float
) -> list[AccountedNode]:
    """Return each node by both accounts. ``now``: Unix seconds, until which a node that has not ended was present."""
    return [
        AccountedNode(
            launch=node.launch,
            node_id=node.node_id,
            incarnation=node.incarnation,
            present_seconds=(end_of(node) if node.ended_at is not None else now) - node.started_at,
            accounted_seconds=account[name].seconds if name in account else None,
            state=account[name].state if name in account else "",
            partition=account[name].partition if name in account else "",
        )
        for node, name in names.items()
    ]


def describe_price(nodes: Sequence[AccountedNode], prices: Mapping[str, float]) -> str:
    """Return what the site charges for the nodes that both accounts have, in words. ``prices``: partition → US dollars
    per node-hour. Partitions without one are named, and not counted."""
    both = [node for node in nodes if node.accounted_seconds is not None]
    priced = [node for node in both if node.partition in prices]
    present = sum(prices[node.partition] * node.present_seconds / 3600 for node in priced)
    accounted = sum(prices[node.partition] * (node.accounted_seconds or 0.0) / 3600 for node in priced)
    line = (
        f"at the prices of the partitions: ${present:.4f} by presence, ${accounted:.4f} by SLURM's accounting "
        f"({len(priced)} nodes)"
    )
    without = sorted({node.partition for node in both} - set(prices))
    return f"{line}; no price is given for {', '.join(without)}" if without else line


def describe_accounts(nodes: Sequence[AccountedNode]) -> list[str]:
    """Return the comparison as lines for people: each node, and the sum."""
    lines = [f"{'launch':>6} {'node':>4} {'incarnation':>11} {'presence':>10} {'SLURM':>10} {'difference':>10}  ended"]
    for node in nodes:
        told = "none" if node.accounted_seconds is None else f"{node.accounted_seconds:.0f} s"
        difference = "" if node.difference is None else f"{node.difference:+.1f} s"
        lines.append(
            f"{node.launch:>6} {node.node_id:>4} {node.incarnation:>11} {node.present_seconds:>8.1f} s {told:>10} "
            f"{difference:>10}  {node.state.lower()}"
        )
    both = [node for node in nodes if node.accounted_seconds is not None]
    present = sum(node.present_seconds for node in both)
    accounted = sum(node.accounted_seconds or 0.0 for node in both)
    share = f" ({(accounted - present) / present:+.1%})" if present else ""
    lines.append(
        f"{len(both)} of {len(nodes)} nodes in both: {present:.1f} s of presence, {accounted:.0f} s in SLURM's "
        f"accounting{share}; costs are computed from presence"
    )
    return lines

"""SLURM's account of a job's nodes, held against their own presence, in words.

The two begin and end at different moments: SLURM counts from the start of the batch script, and until all of it is
cleaned up; a presence from the start of the agent to the end of its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.clusters.presence import end_of
from dtrain_dagster.clusters.slurm import commands
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.supervision.engine import EngineUnreachableError, name_job
from dtrain_dagster.settings.slurm import SlurmSettings, read_partition_prices
from trainer.documents.presences import NodePresence
from trainer.rundir import LAUNCH, RunDir


class AccountedJob(NamedTuple):
    """One job, as SLURM accounts it."""

    seconds: float
    state: str
    partition: str


def describe_account(options: Mapping[str, Any], rundir: RunDir) -> list[str]:
    """Return both accounts of a job's nodes as lines for people; none where SLURM has no account of them, or cannot be
    asked now: presence is what costs are computed from."""
    launch = rundir.read_json(LAUNCH) or {}
    names = {
        node: name_job({**launch, "launch": node.launch}, node.node_id, node.incarnation) for node in rundir.nodes()
    }
    if not names:
        return []
    engine = SlurmEngine(SlurmSettings.of(options), Path(), lambda launch, node_id, incarnation: ())
    since = min(node.started_at for node in names) - 3600
    try:
        told = engine.run(commands.account(list(names.values()), since), "read the accounting")
    except (ClusterError, EngineUnreachableError):
        return []
    return compare_accounts(names, read_account(told), read_partition_prices(), time.time())


def read_account(text: str) -> dict[str, AccountedJob]:
    """Return name of a job → its account, from what sacct prints. A job that was accounted twice counts twice."""
    found: dict[str, AccountedJob] = {}
    for line in text.splitlines():
        row = dict(zip(commands.ACCOUNTED, line.split("|"), strict=False))
        if len(row) == len(commands.ACCOUNTED) and row["ElapsedRaw"].isdigit():
            before = found[row["JobName"]].seconds if row["JobName"] in found else 0.0
            found[row["JobName"]] = AccountedJob(
                before + float(row["ElapsedRaw"]), row["State"].split()[0], row["Partition"]
            )
    return found


def compare_accounts(
    names: Mapping[NodePresence, str], account: Mapping[str, AccountedJob], prices: Mapping[str, float], now: float
) -> list[str]:
    """Return a line for each node by both accounts, their sum, and what the site charges for it; none where SLURM has
    no node. Pure. ``names``: presence → the name of its job. ``prices``: partition → US dollars per node-hour; those
    without one are named, and not counted. ``now``: Unix seconds, until which a node that has not ended was present."""
    lines = [f"{'launch':>6} {'node':>4} {'incarnation':>11} {'presence':>10} {'SLURM':>10} {'difference':>10}  ended"]
    both: list[tuple[float, AccountedJob]] = []
    for node, name in names.items():
        seconds, job = (end_of(node) if node.ended_at is not None else now) - node.started_at, account.get(name)
        told, difference, state = "none", "", ""
        if job is not None:
            both.append((seconds, job))
            told, difference, state = f"{job.seconds:.0f} s", f"{job.seconds - seconds:+.1f} s", job.state.lower()
        lines.append(
            f"{node.launch:>6} {node.node_id:>4} {node.incarnation:>11} {seconds:>8.1f} s {told:>10} {difference:>10}  "
            f"{state}"
        )
    if not both:
        return []
    present, accounted = sum(seconds for seconds, _ in both), sum(job.seconds for _, job in both)
    share = f" ({(accounted - present) / present:+.1%})" if present else ""
    lines.append(
        f"{len(both)} of {len(names)} nodes in both: {present:.1f} s of presence, {accounted:.0f} s in SLURM's "
        f"accounting{share}; costs are computed from presence"
    )
    if prices:
        priced = [(prices[job.partition] / 3600, seconds, job) for seconds, job in both if job.partition in prices]
        without = sorted({job.partition for _, job in both} - set(prices))
        lines.append(
            f"at the prices of the partitions: ${sum(price * seconds for price, seconds, _ in priced):.4f} by "
            f"presence, ${sum(price * job.seconds for price, _, job in priced):.4f} by SLURM's accounting "
            f"({len(priced)} nodes)" + (f"; no price is given for {', '.join(without)}" if without else "")
        )
    return lines

"""The account of one job: SLURM's accounting is asked for its nodes, and held against their presence.

What the two mean, and how they are told, is in `accounting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.slurm import commands
from dtrain_dagster.clusters.slurm.accounting import AccountedNode, compare_accounts, names_of, read_account
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.settings.slurm import SlurmSettings
from trainer.rundir import LAUNCH, RunDir


def account_nodes(options: Mapping[str, Any], rundir: RunDir, now: float) -> list[AccountedNode]:
    """Return each node of a job by both accounts; ``now``: Unix seconds. Raise as `SlurmEngine.run` does where there is
    no accounting, or it cannot be asked now."""
    nodes = rundir.nodes()
    names = names_of(rundir.read_json(LAUNCH) or {}, nodes)
    if not names:
        return []
    engine = SlurmEngine(SlurmSettings.of(options), Path(), lambda launch, node_id, incarnation: ())
    since = min(node.started_at for node in nodes) - 3600
    told = engine.run(commands.account(list(names.values()), since), "read the accounting")
    return compare_accounts(names, read_account(told), now)

"""The nodes of a cluster's computes, and how they are given back where the service does not do it by itself.

First the service is told once more to keep no node that idles, which disturbs nobody's work. Where nodes stay all the
same the compute is deleted, after a look through everybody's jobs in the workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dtrain_dagster.clusters.azure_ml.client import ServiceError
from dtrain_dagster.clusters.azure_ml.jobs import Jobs
from dtrain_dagster.clusters.azure_ml.provision import (
    BROKEN,
    MOVING,
    NODES_THERE,
    TIMED_OUT,
    Provisioner,
    compute_tier,
    word_of,
)
from dtrain_dagster.clusters.base import InUseError, NodePool

ANYWHERE = ""
"""Where a job will work that waits for its next launch: it may be any compute."""
LEAVING_SECONDS = 180.0
"""How long the service may take to remove nodes that have idled for as long as they may."""


class Pools:
    """One for each compute. The service is asked with the patience of a look, unless it is told."""

    def __init__(self, provisioner: Provisioner, jobs: Jobs) -> None:
        self.provisioner, self.jobs, self.options = provisioner, jobs, provisioner.options
        self.patience = self.options.look_patience_seconds

    def look(self, work: Mapping[str, Sequence[str]], used_at: float | None) -> list[NodePool]:
        """``work``: jobs of this cluster that have not ended, by compute. Those of others are seen by their nodes."""
        found = []
        for name, compute in self.provisioner.computes(self.patience).items():
            nodes = self.provisioner.nodes(name, self.patience)
            states = Counter(state for _, state, _ in nodes)
            trouble, grace = why_nodes_stay(
                word_of(compute.provisioning_state), int(compute.min_instances or 0), self.options.operation_seconds
            )
            at_work = [job or node for node, state, job in nodes if state == "running" or job]
            found.append(
                NodePool(
                    name=name,
                    sku=str(compute.size),
                    tier=compute_tier(compute),
                    states=dict(sorted(states.items())),
                    node_count=sum(states[state] for state in NODES_THERE),
                    work=tuple(dict.fromkeys([*work.get(ANYWHERE, ()), *work.get(name, ()), *at_work])),
                    used_at=used_at,
                    trouble=trouble,
                    grace_seconds=grace,
                )
            )
        return found

    def give_back(self, name: str, force: bool) -> bool:
        """Have the nodes of a compute removed, with the compute if it is ``force``; whether it is gone. `InUseError`
        for one with work, `ServiceError` where the service does not do it."""
        self.refuse_work(name)
        compute = self.provisioner.settled(name, 0.0)
        if compute is None:
            return True
        try:
            if force or compute.provisioning_state in BROKEN:
                self.provisioner.delete(name, self.patience)
                return True
            self.provisioner.release(compute, self.patience)
        except ServiceError as error:
            if error.code not in (TIMED_OUT, "NotDeleted"):
                raise
        return False

    def refuse_work(self, name: str) -> None:
        """`InUseError` for a compute that somebody uses: what runs on it would be ended with it."""
        jobs = self.jobs.on_compute(name, self.patience)
        busy = [job or node for node, state, job in self.provisioner.nodes(name, self.patience) if state == "running"]
        if jobs or busy:
            raise InUseError(f"compute {name} is at work by now: {', '.join(jobs or busy)}")


def why_nodes_stay(state: str, minimum: int, operation_seconds: float) -> tuple[str, float]:
    """Why idle nodes do not go by themselves, "" where they should; and how many seconds they may take to. Pure."""
    if state in BROKEN:
        return f"it is {state}", 0.0
    if state in MOVING:
        return f"it is {state}", operation_seconds
    if minimum > 0:
        return f"it keeps {minimum} nodes whatever there is to do", 0.0
    return "", LEAVING_SECONDS

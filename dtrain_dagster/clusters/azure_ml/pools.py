"""The nodes of a cluster's computes, and their removal where the service does not do it by itself: the compute is
deleted, after a look through all users' jobs in the workspace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dtrain_dagster.clusters.azure_ml.client import ServiceError
from dtrain_dagster.clusters.azure_ml.compute_description import compute_sku, compute_tier, word_of
from dtrain_dagster.clusters.azure_ml.jobs import Jobs
from dtrain_dagster.clusters.azure_ml.provision import BROKEN, MOVING, NODES_THERE, TIMED_OUT, Provisioner
from dtrain_dagster.clusters.base import InUseError, NodeHealth, NodePool

if TYPE_CHECKING:
    from azure.ai.ml.entities import AmlCompute

ANYWHERE = ""
"""Compute of a job that waits for its next launch: it may be any."""
NOT_PROVISIONED = "not provisioned"
"""Message of health for a cluster without a compute."""
LEAVING_SECONDS = 180.0
"""Seconds that the service may take to remove nodes whose idle time is over."""


class Pools:
    """The pools of a cluster, one for each compute. The service is asked with the patience of a look, unless it is told
    otherwise."""

    def __init__(self, provisioner: Provisioner, jobs: Jobs) -> None:
        self.provisioner, self.jobs, self.options = provisioner, jobs, provisioner.options
        self.patience = self.options.look_patience_seconds

    def look(self, work: Mapping[str, Sequence[str]], used_at: float | None) -> list[NodePool]:
        """Return the pools. ``work``: jobs of this cluster that have not ended, by compute. Those of others are seen by
        their nodes."""
        found = []
        for name, compute, state, minimum, nodes in self._seen(self.patience):
            states = Counter(node_state for _, node_state, _ in nodes)
            trouble, grace = why_nodes_stay(state, minimum, self.options.operation_seconds)
            found.append(
                NodePool(
                    name=name,
                    sku=compute_sku(compute),
                    tier=compute_tier(compute),
                    states=dict(sorted(states.items())),
                    node_count=sum(states[state] for state in NODES_THERE),
                    work=tuple(dict.fromkeys([*work.get(ANYWHERE, ()), *work.get(name, ()), *busy(nodes)])),
                    used_at=used_at,
                    trouble=trouble,
                    grace_seconds=grace,
                )
            )
        return found

    def _seen(self, patience: float) -> Iterator[tuple[str, AmlCompute, str, int, list[tuple[str, str, str | None]]]]:
        """Yield name, compute, state, fewest nodes and nodes of each compute."""
        for name, compute in self.provisioner.computes(patience).items():
            minimum, nodes = int(compute.min_instances or 0), self.provisioner.nodes(name, patience)
            yield name, compute, word_of(compute.provisioning_state), minimum, nodes

    def health(self) -> tuple[tuple[NodeHealth, ...], str]:
        """Return every node as the service sees it, and the faults of the computes, `NOT_PROVISIONED` where there is
        none. The service is asked with the full patience. Raise `ServiceError` where it does not answer."""
        computes = list(self._seen(self.options.patience_seconds))
        broken = [f"{name} is {state}" for name, _, state, _, _ in computes if state in BROKEN]
        listed = [(name, *node) for name, *_, nodes in computes for node in nodes]
        nodes = tuple(
            NodeHealth(
                node_id=index,
                healthy=state in NODES_THERE | {"leaving"},
                message=f"{node} of {name}: {state}" + (f", works on {job}" if job else ""),
            )
            for index, (name, node, state, job) in enumerate(listed)
        )
        return nodes, "; ".join(broken) or ("" if computes else NOT_PROVISIONED)

    def give_back(self, name: str, check: Callable[[], None]) -> bool:
        """Delete a compute with its nodes; return whether it is gone. ``check``: `ClusterUse.giving_back`'s. Raise
        `InUseError` where somebody uses it, of all users: their work would end with it."""
        if self.provisioner.settled(name, 0.0, self.patience) is None:  # one answer may be wrong: the list decides
            return name not in self.provisioner.computes(self.patience)
        check()
        nodes = self.provisioner.nodes(name, self.patience)
        if at_work := self.jobs.on_compute(name, self.patience) or busy(nodes, ("running", "preparing")):
            raise InUseError(f"compute {name} is at work already: {', '.join(at_work)}")
        try:
            self.provisioner.delete(name, self.patience)
        except ServiceError as error:
            if error.code not in (TIMED_OUT, "NotDeleted"):
                raise
            return False
        return True


def busy(nodes: Sequence[tuple[str, str, str | None]], states: Collection[str] = ("running",)) -> list[str]:
    """Return the jobs of nodes that have one, and the nodes in these states. Pure."""
    return [job or node for node, state, job in nodes if state in states or job]


def why_nodes_stay(state: str, minimum: int, operation_seconds: float) -> tuple[str, float]:
    """Return why idle nodes are not removed automatically, "" where they should be, and the seconds that this may take.
    Pure."""
    if state in BROKEN:
        return f"it is {state}", 0.0
    if state in MOVING:
        return f"it is {state}", operation_seconds
    if minimum > 0:
        return f"it keeps {minimum} nodes even when there is no work", 0.0
    return "", LEAVING_SECONDS

"""The kinds of clusters, and the facts on which decisions of all rooms depend. How a kind does its work belongs in its
room. Nothing is imported here that an asset graph would have to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KindName = Literal["local", "azure_ml", "slurm", "kubernetes", "ray"]


@dataclass(frozen=True, slots=True)
class ClusterKind:
    """What a kind of cluster is. The fields are facts, not settings."""

    name: KindName
    words: str
    """What people call it."""
    code: Literal["here", "staged", "image", "uploaded"]
    """How the code comes to the nodes: it is there; copied once per version into the home that they share; part of
    their image; sent with each job."""

    @property
    def is_this_machine(self) -> bool:
        """Whether its nodes divide the cores and GPUs of this machine."""
        return self.name == "local"

    @property
    def buys_nodes(self) -> bool:
        """Whether its nodes are bought from a cloud at a listed price, on a tier; else the price of a SKU stands in."""
        return self.name == "azure_ml"

    @property
    def has_engine(self) -> bool:
        """Whether an engine runs each node for us as a job of its own."""
        return not (self.is_this_machine or self.buys_nodes)

    @property
    def shares_home(self) -> bool:
        """Whether nodes see the home at the same path as this machine."""
        return not self.buys_nodes


KINDS: dict[str, ClusterKind] = {
    kind.name: kind
    for kind in (
        ClusterKind("local", "local cluster", "here"),
        ClusterKind("azure_ml", "Azure ML workspace", "uploaded"),
        ClusterKind("slurm", "SLURM cluster", "staged"),
        ClusterKind("kubernetes", "Kubernetes cluster", "image"),
        ClusterKind("ray", "Ray cluster", "staged"),
    )
}
"""Kind of cluster, as DTRAIN_CLUSTER names it → its facts."""


def cluster_key(kind: str, name: str) -> str:
    """Return what tells a cluster apart among those of all kinds: a tag, a ticket and a folder have it. Pure."""
    return f"{kind}.{name}"

"""The kinds of clusters, the tiers on which nodes are bought, and the facts on which decisions of all rooms depend. How
a kind does its work belongs in its room. Nothing is imported here that an asset graph would have to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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


Tier = Literal["dedicated", "spot"]
TIERS: tuple[Tier, ...] = get_args(Tier)
OLD_SPOT = "low_priority"
"""The name of the tier before 2026-03-31, when Azure ML retired its low-priority nodes. It stands in plans
and run directories of that time, and Azure ML's interfaces still take no other word for Spot."""
SPOT_QUOTA = 'Spot cores ("low-priority cores" in Azure ML, "Total Regional Spot vCPUs" of virtual machines)'
"""The quota of Spot nodes, under both of its names."""


def current_tier(name: str) -> str:
    """Return the name that a tier has now; a name that no tier ever had stays as it is."""
    return "spot" if name == OLD_SPOT else name


def tier_of(name: str) -> Tier:
    """Return the tier of that name, as clusters, settings and stored plans give it."""
    return next((tier for tier in TIERS if tier == current_tier(name)), "dedicated")


def tier_in_words(name: str) -> str:
    """Return the tier as people write it."""
    return "Spot" if current_tier(name) == "spot" else name.replace("_", " ")

"""The kinds of clusters and what each can do, declared in one place: what is shown, and what is computed, asks here.

How a kind does it belongs in its room. Nothing is imported here that an asset graph would have to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KindName = Literal["local", "azure_ml", "slurm", "kubernetes", "ray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterKind:
    """What a kind of cluster is and can do. The fields are facts, not settings."""

    name: str
    words: str
    """What people call it."""
    is_this_machine: bool = False
    """Whether its nodes divide the cores and GPUs of this machine."""
    buys_nodes: bool = False
    """Whether its nodes are bought from a cloud at a listed price, on a tier; else the price of a SKU stands in."""
    has_site_prices: bool = False
    """Whether a file may say what its nodes cost; without one the price of a SKU stands in."""
    has_tiers: bool = False
    """Whether its nodes are offered on several tiers, at prices of their own."""
    has_engine: bool = False
    """Whether an engine runs each node for us as a job of its own."""
    code: Literal["here", "staged", "image", "uploaded"] = "here"
    """How the code comes to the nodes: it is there; copied once per version into the home that they share; part of
    their image; sent with each job."""
    shares_home: bool = True
    """Whether nodes see the home at the same path as this machine."""
    queues: bool = False
    """Whether nodes may have to wait for a place, and why is told."""
    preempts: bool = False
    """Whether the cluster may take a node away for another's job."""
    has_time_limit: bool = False
    """Whether nodes may end at a time limit, before which a successor is submitted."""
    has_accounting: bool = False
    """Whether the cluster keeps an account of its own of the time of nodes."""
    has_live_logs: bool = True
    """Whether the output of nodes is there while they run."""
    has_live_metrics: bool = True
    """Whether steps, losses, figures of the hardware and costs are known while nodes run: they write them into the run
    directory."""
    outlives_supervisor: bool = False
    """Whether nodes go on when their supervisor is killed; another takes over then."""


KINDS: dict[str, ClusterKind] = {
    kind.name: kind
    for kind in (
        ClusterKind(name="local", words="local cluster", is_this_machine=True),
        ClusterKind(
            name="azure_ml", words="Azure ML workspace", buys_nodes=True, has_tiers=True, code="uploaded",
            shares_home=False, queues=True, preempts=True, has_accounting=True, outlives_supervisor=True,
        ),
        ClusterKind(
            name="slurm", words="SLURM cluster", has_site_prices=True, has_engine=True, code="staged", queues=True,
            preempts=True, has_time_limit=True, has_accounting=True, outlives_supervisor=True,
        ),
        ClusterKind(
            name="kubernetes", words="Kubernetes cluster", has_engine=True, code="image", queues=True, preempts=True,
            outlives_supervisor=True,
        ),
        ClusterKind(
            name="ray", words="Ray cluster", has_engine=True, code="staged", queues=True, outlives_supervisor=True,
        ),
    )
}  # fmt: skip
"""Kind of cluster, as DTRAIN_CLUSTER names it → what it can do."""


def describe_kind(kind: ClusterKind) -> dict[str, str]:
    """Return what a kind can do in words, for people."""
    prices = "list price of its SKU, by tier" if kind.buys_nodes else "stand-in: the list price of DTRAIN_GPU_TYPE"
    if kind.has_site_prices:
        prices = f"the site's, by partition, where a file gives it; else {prices}"
    code = {
        "here": "in place",
        "staged": "copied once per version into the home",
        "image": "in the image of the nodes",
        "uploaded": "sent with each job",
    }[kind.code]
    return {
        "kind": kind.words,
        "price": prices,
        "tiers": _yes(kind.has_tiers, "dedicated or Spot"),
        "code": code,
        "waits in a queue": _yes(kind.queues, "with the reason told"),
        "takes nodes away": _yes(kind.preempts, "which are replaced"),
        "time limit of nodes": _yes(kind.has_time_limit, "with a successor before it"),
        "account of its own": _yes(kind.has_accounting, "beside the presence of nodes"),
        "logs while it runs": _yes(kind.has_live_logs, ""),
        "live metrics": _yes(kind.has_live_metrics, "from the run directory"),
        "traffic of nodes": "within this machine" if kind.is_this_machine else "encrypted, but for NCCL's",
        "outlives its supervisor": _yes(kind.outlives_supervisor, "another takes over"),
    }


def _yes(does: bool, how: str) -> str:
    return (f"yes, {how}" if how else "yes") if does else "no"


def cluster_key(kind: str, name: str) -> str:
    """Return what tells a cluster apart among those of all kinds: a tag, a ticket and a folder have it. Pure."""
    return f"{kind}.{name}"

"""The number of ranks of a node: one for each of its GPUs, unless it is stated.

The GPUs of this machine are counted and divided in `trainer.node.gpus`.
"""

from __future__ import annotations

import os

from dtrain_dagster.costs.prices import SkuPrice, price_of
from dtrain_dagster.settings.cluster_kinds import ClusterKind
from dtrain_dagster.support.formatting import dollars
from trainer.node.gpus import visible_gpus


def ranks_per_node(
    stated: int | None, kind: ClusterKind, gpu_type: str, node_count: int, gpus: int | None = None
) -> int:
    """Return the ranks of each node: those that are ``stated``, else one per GPU, and one where there is no GPU.

    A node that is bought has the GPUs of its SKU, one of an engine those that it is asked for (``gpus``); on the local
    cluster the nodes divide the GPUs of this machine. Raise `PriceError` for a SKU that the price table does not know.
    """
    if stated:
        return stated
    if kind.buys_nodes:
        gpus = price_of(gpu_type).gpus
    elif kind.is_this_machine:
        gpus = len(visible_gpus(os.environ)) // max(1, node_count)
    return max(1, gpus or 0)


def hosts_of(kind: ClusterKind, node_count: int) -> int:
    """Return the number of machines that nodes are on: one where they divide this machine."""
    return 1 if kind.is_this_machine else node_count


def have_gpus(kind: ClusterKind, gpu_type: str, gpus: int | None = None) -> bool:
    """Return whether nodes are known to have GPUs: those of a SKU that is bought, or those that an engine is asked for
    (``gpus``). Raise `PriceError` for a SKU that the price table does not know."""
    return price_of(gpu_type).gpus > 0 if kind.buys_nodes else bool(gpus)


def explain_idle_gpus(price: SkuPrice, ranks: int, node_count: int, usd: float, is_local: bool) -> str | None:
    """Return a sentence on the GPUs of a plan that are paid and not used, with their dollars; None where each has a
    rank. Pure. ``usd``: the expected cost of the training on ``node_count`` nodes."""
    idle = price.gpus - ranks
    if idle <= 0:
        return None

    said = (
        f"each {price.sku} has {price.gpus} GPUs and {ranks} of them train(s): {dollars(usd * idle / price.gpus)} of "
        f"{dollars(usd)} pay for {node_count * idle} idle GPU(s)"
    )
    if is_local:
        return f"{said}, if it ran there: here {ranks} process(es) of this machine stand in for a node"
    return f"{said}; unset DTRAIN_PROCESSES_PER_NODE for one rank per GPU, or take a smaller SKU (DTRAIN_GPU_TYPE)"

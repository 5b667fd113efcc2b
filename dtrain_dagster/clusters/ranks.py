"""The number of ranks of a node: one for each of its GPUs, unless it is stated.

The GPUs of this machine are counted here; which of them a node of the local cluster gets belongs in
`dtrain_dagster.clusters.local.environment`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache

from dtrain_dagster.costs.prices import SkuPrice, price_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable of CUDA: the GPUs that a process may use, by number or name, separated by commas."""


def ranks_per_node(stated: int | None, kind: str, gpu_type: str, node_count: int) -> int:
    """Return the ranks of each node: those that are ``stated``, else one per GPU, and one where there is no GPU.

    On Azure ML a node has the GPUs of its SKU; on the local cluster the nodes divide the GPUs of this machine. Raise
    `PriceError` for a SKU that the price table does not know.
    """
    if stated:
        return stated
    gpus = price_of(gpu_type).gpus if kind == "azure_ml" else len(visible_gpus(os.environ)) // max(1, node_count)
    return max(1, gpus)


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of this machine that a process with this environment may use, by number; empty without a
    driver."""
    present = tuple(map(str, range(_gpu_count())))
    allowed = environment.get(VISIBLE)
    if allowed is None or not present:
        return present
    return tuple(name.strip() for name in allowed.split(",") if name.strip())


def explain_idle_gpus(price: SkuPrice, ranks: int, node_count: int, usd: float, is_local: bool) -> str | None:
    """Return a sentence on the GPUs of a plan that are paid and not used, with their dollars; None where each has a
    rank. Pure. ``usd``: the expected cost of the training on ``node_count`` nodes."""
    idle = price.gpus - ranks
    if idle <= 0:
        return None
    from dtrain_dagster.support.formatting import dollars

    said = (
        f"each {price.sku} has {price.gpus} GPUs and {ranks} of them train(s): {dollars(usd * idle / price.gpus)} of "
        f"{dollars(usd)} pay for {node_count * idle} idle GPU(s)"
    )
    if is_local:
        return f"{said}, if it ran there: here {ranks} process(es) of this machine stand in for a node"
    return f"{said}; unset DTRAIN_PROCESSES_PER_NODE for one rank per GPU, or take a smaller SKU (DTRAIN_GPU_TYPE)"


def share_gpus(gpus: Sequence[str], node_id: int, node_count: int, ranks: int) -> tuple[str, ...]:
    """Return the GPUs of one of several nodes that are this machine: one for each of its ranks. Where there are too few
    for all, no node gets any, since ranks of one training compute alike. Pure."""
    if len(gpus) < node_count * ranks:
        return ()
    return tuple(gpus[node_id * ranks : (node_id + 1) * ranks])


def explain_local_gpus(gpus: int, node_count: int, ranks: int) -> str | None:
    """Return a sentence on GPUs of this machine that its nodes do not use; None where each has a rank. Pure."""
    wanted = node_count * ranks
    if gpus in (0, wanted):
        return None
    if gpus > wanted:
        return (
            f"{gpus - wanted} of this machine's {gpus} GPUs have no rank: set DTRAIN_NODES or DTRAIN_PROCESSES_PER_NODE"
        )
    return (
        f"this machine has {gpus} GPU(s) for {wanted} ranks, so all train on the CPU: DTRAIN_NODES=1 with "
        f"DTRAIN_PROCESSES_PER_NODE={gpus} (or unset) trains on the GPU(s)"
    )


@cache
def _gpu_count() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no driver, no library, no permission: there is no GPU to train on
        return 0

"""The GPUs of this machine, and which of them each node of the local cluster gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from trainer.runtime.cores import gpu_handles

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable of CUDA: the GPUs that a process may use, by number or name, separated by commas."""


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of this machine that a process with this environment may use, by number; empty without a
    driver."""
    present = tuple(map(str, range(_gpu_count())))
    allowed = environment.get(VISIBLE)
    if allowed is None or not present:
        return present
    return tuple(name.strip() for name in allowed.split(",") if name.strip())


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
def least_gpu_bytes() -> int:
    """Return the memory of the smallest GPU of this machine; 0 where there is no driver."""
    handles = gpu_handles()
    try:
        import pynvml

        return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=0)
    except Exception:  # a GPU that does not tell, or that this process may not ask
        return 0


@cache
def _gpu_count() -> int:
    return len(gpu_handles())

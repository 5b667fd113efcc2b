"""Whether a model fits into the memory of the planned nodes, said before they are bought. Pure, but for `room_of`.

What a rank needs is `trainer.performance.memory`'s formula; the bytes of the model come from the rehearsal of a
training (`trainer.isolation.runner`) or from its script. Memory that a driver or an allocator takes is not
counted, so that a training which is refused here could not have run; one that only just fits is warned of.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.clusters.resume_advice import name_larger_skus
from dtrain_dagster.costs.prices import SkuPrice
from dtrain_dagster.settings.cluster_kinds import ClusterKind
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.node.gpus import least_gpu_bytes, visible_gpus
from trainer.performance.memory import (
    GIB,
    ModelBytes,
    RankBytes,
    count_sharing,
    format_bytes,
    most_samples,
    rank_bytes,
    zero_rank_bytes,
)
from trainer.runtime.host_memory import machine_bytes

FITS = 0.9
"""Share of the memory that a training may need: the rest is for drivers, allocators and buffers."""
MOST_NODES = 64
"""The most nodes that are named as a way out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRoom:
    """The memory that each rank of the planned nodes has."""

    bytes: float
    words: str
    """Whose memory it is: ``Standard_NC6s_v3 has 16 GiB for each GPU``."""
    node_count: int
    ranks_per_node: int
    on_gpu: bool = False
    is_shared: bool = False
    """Whether all nodes are on one machine, whose memory they divide."""

    def on_nodes(self, count: int) -> MemoryRoom:
        factor = self.node_count / count if self.is_shared else 1.0
        return replace(self, node_count=count, bytes=self.bytes * factor)


def room_of(kind: ClusterKind, price: SkuPrice, node_count: int, ranks_per_node: int) -> MemoryRoom | None:
    """Return the memory of each rank, None where it is not known: nodes of an engine have what the site gives them."""
    ranks = max(1, ranks_per_node)
    if kind.buys_nodes:
        return room_of_sku(price, node_count, ranks)
    if not kind.is_this_machine:
        return None
    every = node_count * ranks
    if len(visible_gpus(os.environ)) >= every:
        least = least_gpu_bytes()
        if not least:
            return None
        words = f"the smallest GPU of this machine has {format_bytes(least)}"
        return MemoryRoom(bytes=least, words=words, node_count=node_count, ranks_per_node=ranks, on_gpu=True)

    whole = machine_bytes()
    words = f"this machine has {format_bytes(whole)} for {every} rank{'s' if every > 1 else ''}"
    return MemoryRoom(bytes=whole / every, words=words, node_count=node_count, ranks_per_node=ranks, is_shared=True)


def room_of_sku(price: SkuPrice, node_count: int, ranks: int) -> MemoryRoom:
    """Return the memory of each rank of nodes of a SKU: of its GPU, which ranks may have to share, or of the host."""
    if price.gpus:
        on_one = math.ceil(ranks / price.gpus)
        words = f"{price.sku} has {price.gpu_memory_gib} GiB for each GPU" + (f" of {on_one} ranks" * (on_one > 1))
        bytes_ = price.gpu_memory_gib * GIB / on_one
    else:
        words, bytes_ = f"{price.sku} has {price.memory_gib} GiB for {ranks} rank(s)", price.memory_gib * GIB / ranks
    return MemoryRoom(bytes=bytes_, words=words, node_count=node_count, ranks_per_node=ranks, on_gpu=bool(price.gpus))


def need_of(
    model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, samples: int, strategy: str = ""
) -> RankBytes:
    """Return what each rank of these nodes needs, for passes of this many samples. ``strategy``: instead of the
    training's own. With ``cpu_offload`` a GPU has what is gathered alone, and the whole model with DeepSpeed."""
    ranks = room.node_count * room.ranks_per_node
    if (strategy or training.strategy) == "deepspeed":
        need = zero_rank_bytes(model, training.zero_stage, ranks, samples, training.precision)
        if training.cpu_offload and room.on_gpu:
            copies = 2 if training.zero_stage < 3 else 1
            return replace(need, parameters=copies * model.parameters, gradients=0, moments=0)
        return need
    sharing = count_sharing(strategy or training.strategy, ranks, room.ranks_per_node)
    need = rank_bytes(model, sharing, samples, training.precision, training.gather_precision)
    if training.cpu_offload and room.on_gpu and sharing > 1:
        return replace(need, parameters=0, gradients=0, moments=0)
    return need


def why_too_small(model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom) -> str:
    """Return why the model cannot be trained on these nodes with any batch; "" if it can be."""
    need = need_of(model, training, room, 0)
    if need.least <= room.bytes:
        return ""
    gathered = f" ({format_bytes(need.gathered)} of it gathered)" if need.gathered else ""
    return (
        f"does not fit: {format_bytes(need.least)} a rank with training.strategy = {training.strategy!r}{gathered}, "
        f"and {room.words}"
    )


def judge_memory(
    model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, prices: Iterable[SkuPrice] = ()
) -> str:
    """Return a sentence where a training only just fits on these nodes, or only in parts; "" where it fits. Raise
    `ConfigError`, with the remedy, where it cannot run. ``prices``: the SKUs that could be had instead."""
    if why := why_too_small(model, training, room):
        ways = _ways(model, training, room, prices) or ["train a smaller model"]
        raise ConfigError(f"the model {why}; {'; '.join(ways)}")
    batch = training.batch_size_per_gpu
    need = need_of(model, training, room, batch)
    if need.total <= FITS * room.bytes:
        return ""
    said = f"memory is short: {format_bytes(need.total)} a rank with {batch} samples at once, and {room.words}"
    if need.activations:
        most = most_samples(need_of(model, training, room, 1), FITS * room.bytes) or 0
        said += f". At most about {most} fit (training.batch_size_per_gpu)"
        if not training.activation_checkpointing:
            said += "; training.activation_checkpointing = true takes less"
    return "; ".join([said, *_ways_to_share(model, training, room, batch)])


def _ways(
    model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, prices: Iterable[SkuPrice]
) -> list[str]:
    ways = _ways_to_share(model, training, room, 1)
    needed = need_of(model, training, room, 0).least
    memory: Mapping[str, Any] = {"needed_bytes": needed, "device": "cuda" if room.on_gpu else "cpu"}
    if larger := name_larger_skus(prices, memory, room.ranks_per_node):
        ways.append(f"a SKU with {format_bytes(needed)} would, as {larger}")
    if room.is_shared and not ways:
        ways.append("fewer ranks on this machine would have more each (DTRAIN_NODES, DTRAIN_PROCESSES_PER_NODE)")
    return ways


def _ways_to_share(model: ModelBytes, training: DistributedTrainingConfig, room: MemoryRoom, samples: int) -> list[str]:
    """Return how ranks could share the model for passes of this many samples: here, else on the fewest that suffice."""

    def fits(strategy: str, there: MemoryRoom) -> bool:
        return need_of(model, training, there, samples, strategy).total <= FITS * there.bytes

    def each(strategy: str, there: MemoryRoom) -> str:
        return format_bytes(need_of(model, training, there, training.batch_size_per_gpu, strategy).least)

    if training.strategy in ("ddp", "horovod") and room.ranks_per_node > 1 and fits("hsdp", room):
        return [f'training.strategy = "hsdp" would, {each("hsdp", room)} each']
    least = room.node_count + (training.strategy == "fsdp")
    for count in range(least, (room.node_count if room.is_shared else MOST_NODES) + 1):
        there, ranks = room.on_nodes(count), count * room.ranks_per_node
        if ranks > 1 and fits("fsdp", there):
            more = "" if count == room.node_count else f" (DTRAIN_NODES = {count})"
            return [f'training.strategy = "fsdp" on {ranks} ranks would, {each("fsdp", there)} each{more}']
    return []

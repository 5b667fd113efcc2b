"""The GPU memory that a sample takes, and the samples that fit, from what the nodes measured. Pure.

A process holds weights, gradients and the two moments of Adam, which do not grow with the batch, and activations, which
do. Where it has told what it holds between steps, data on the GPU among it, that does not grow either. What else it
holds (the driver's context, the allocator's reserve, what ranks that share a model gather of it) is counted with the
activations, so a sample seems larger than it is, and a recommended batch is rather too small than too large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.documents.events import NodeEvent, OutOfMemoryEvent, TimingEvent, read_events
from trainer.performance.memory import ModelBytes, count_sharing, rank_bytes

MEMORY_LOW, MEMORY_TARGET = 0.70, 0.85
"""Shares of a GPU's memory: below the first a larger batch is recommended, one that needs the second."""
MULTIPLE, MOST = 8, 64
"""Batches are multiples of the first, and at most the present one times the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUMemory:
    """The fullest GPU of a job, at its fullest, in bytes."""

    used: int
    total: int
    state: float
    """Bytes of weights, gradients and moments."""
    batch: int
    """Samples of a micro-batch."""
    ranks: int
    """Ranks that share the GPU."""
    sharing: int = 1
    """Ranks that hold one copy of the model together."""
    fixed: float = 0.0
    """Bytes beside ``state`` that were measured between steps, such as data on the GPU."""

    @property
    def fraction(self) -> float:
        return self.used / self.total

    @property
    def bytes_per_sample(self) -> float:
        return (self.used - self.state - self.fixed) / (self.batch * self.ranks)

    def batch_at(self, target: float = MEMORY_TARGET) -> int:
        """Return the batch that fills this share of the memory; never smaller than now."""
        room = (target * self.total - self.state - self.fixed) / (self.bytes_per_sample * self.ranks)
        return max(self.batch, int(min(room, MOST * self.batch)) // MULTIPLE * MULTIPLE)

    def used_with(self, sharing: int) -> float:
        """Return the bytes that would be in use if so many ranks held one copy of the model together."""
        return self.used + self.state * (self.sharing / sharing - 1)


def gpu_memory(
    world: Sequence[TimingEvent], events: Sequence[Mapping[str, Any]], training: Mapping[str, Any]
) -> GPUMemory | str:
    """Return the fullest GPU of a job, or why it is not known or a larger batch would not help."""
    batch = training.get("batch_size_per_gpu") or world[-1].facts.get("local_samples_per_micro_batch")
    samples = read_events(NodeEvent, events)
    looks = [(item, gpu) for item in samples for gpu in item.gpus]
    looks = [(item, gpu) for item, gpu in looks if gpu.get("memory_used_bytes") and gpu.get("memory_total_bytes")]
    if not looks:
        return "no GPU's memory was measured on these nodes"
    if not batch:
        return "the size of a micro-batch is not known"
    if read_events(OutOfMemoryEvent, events):
        return (
            "memory ran out in this job: its micro-batches went through the model in parts, and do not fit as they are"
        )
    item, gpu = max(looks, key=lambda look: look[1]["memory_used_bytes"] / look[1]["memory_total_bytes"])
    here = {other.node_id for other in samples if other.machine == item.machine}
    ranks = max(1, math.ceil(sum(node in here for node in world[-1].nodes) / len(item.gpus)))
    used = int(gpu["memory_used_bytes"])
    parameters = int(world[-1].facts.get("parameters_bytes") or 0)
    sharing = sharing_of(world[-1], str(training.get("strategy") or "ddp"))
    state = ranks * rank_bytes(ModelBytes(parameters=parameters, trained=parameters), sharing).held
    most = 0.9 * used
    held = min(most, ranks * int(world[-1].facts.get("held_bytes") or 0))
    return GPUMemory(
        used=used,
        total=int(gpu["memory_total_bytes"]),
        state=min(state, most),
        fixed=max(0.0, held - state),
        batch=int(batch),
        ranks=ranks,
        sharing=sharing,
    )


def sharing_of(item: TimingEvent, strategy: str, nodes: int | None = None) -> int:
    """Return how many ranks hold one copy of the model together, in the world of an event or on other ``nodes`` of its
    kind."""
    count = len(set(item.nodes)) or 1
    each = max(1, item.world_size // count)
    return count_sharing(strategy, (nodes or count) * each, each)

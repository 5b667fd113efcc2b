"""The GPU memory that a sample takes, and the samples that fit, from what the nodes measured. Pure.

A process holds weights, gradients and the two moments of Adam, and data on the GPU, which do not grow with the batch,
and activations, which do. What else it holds (the driver's context, the allocator's reserve) is counted with the
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
    held: float
    """Bytes that do not grow with the batch."""
    batch: int
    """Samples of a micro-batch."""
    ranks: int
    """Ranks that share the GPU."""

    @property
    def fraction(self) -> float:
        return self.used / self.total

    @property
    def bytes_per_sample(self) -> float:
        return (self.used - self.held) / (self.batch * self.ranks)

    def batch_at(self, target: float = MEMORY_TARGET) -> int:
        """Return the batch that fills this share of the memory; never smaller than now."""
        room = (target * self.total - self.held) / (self.bytes_per_sample * self.ranks)
        return max(self.batch, int(min(room, MOST * self.batch)) // MULTIPLE * MULTIPLE)


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
    used, facts, size = int(gpu["memory_used_bytes"]), world[-1].facts, world[-1].world_size
    parameters = int(facts.get("parameters_bytes") or 0)
    sharing = count_sharing(str(training.get("strategy") or "ddp"), size, max(1, size // len(set(world[-1].nodes))))
    state = rank_bytes(ModelBytes(parameters=parameters, trained=parameters), sharing).held
    held = ranks * max(state, int(facts.get("held_bytes") or 0))
    return GPUMemory(
        used=used, total=int(gpu["memory_total_bytes"]), held=min(held, 0.9 * used), batch=int(batch), ranks=ranks
    )

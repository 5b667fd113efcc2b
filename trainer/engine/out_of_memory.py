"""The steps taken when memory runs out: smaller parts of a micro-batch, then activation checkpointing
(`trainer.model.blocks`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_WORDS = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class MicroBatchLimit:
    """The part of a micro-batch that fits into memory."""

    max_samples: int
    """The most samples that go through the model at once."""
    activation_checkpointing: bool


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out: a GPU's own exception, Python's, or a plain RuntimeError of
    torch's allocator on the CPU or of a GPU's libraries."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def reduce_limit(fit: MicroBatchLimit, floor: int) -> MicroBatchLimit | None:
    """Return the next limit to try: half as many samples at once, at the floor activation checkpointing, then None."""
    if fit.max_samples > floor:
        return MicroBatchLimit(max(floor, fit.max_samples // 2), fit.activation_checkpointing)
    return None if fit.activation_checkpointing else MicroBatchLimit(fit.max_samples, True)


def limit_evaluation(limit: MicroBatchLimit, planned: int, most: int) -> int:
    """Return the samples that are evaluated at once: ``most``, but no more than training takes once memory has run out.
    ``planned``: the samples of a micro-batch. Pure."""
    is_short = limit.activation_checkpointing or limit.max_samples < planned
    return min(most, limit.max_samples) if is_short else most

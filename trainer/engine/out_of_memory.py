"""The steps taken when memory runs out: smaller parts of a micro-batch, then activation checkpointing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.model.blocks import find_blocks, is_long

_MARK = "_computes_activations_twice"
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


def checkpoint_activations(model: nn.Module) -> int:
    """Compute the activations inside the model's blocks twice instead of keeping them. Return the number of blocks, 0
    where the model has none. Gradients, dropout and running statistics stay the same. It works in place, and once only.

    Blocks are the repeated parts: members of lists of modules, or else a module's own parts. A single layer of torch's
    is no block, since it keeps little more than its input, which a block keeps too. A long `nn.Sequential` is cut into
    runs of about the square root of its length: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    blocks = find_blocks(model)
    for block in blocks:
        if not getattr(block, _MARK, False):
            setattr(block, _MARK, True)
            block.forward = partial(_in_runs if is_long(block) else _twice, block)
    return len(blocks)


def _twice(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(block, [block], partial(type(block).forward, block), *args, **kwargs)


def _in_runs(block: nn.Module, x: Any) -> Any:
    layers = list(block.children())
    size = math.ceil(math.sqrt(len(layers)))
    for first in range(0, len(layers), size):
        run = layers[first : first + size]
        x = _checkpointed(block, run, partial(reduce, _apply, run), x)
    return x


def _apply(x: Any, layer: nn.Module) -> Any:
    return layer(x)


def _checkpointed(block: nn.Module, modules: list[nn.Module], forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (torch.is_grad_enabled() and block.training):
        return forward(*args, **kwargs)
    contexts = partial(_contexts, modules)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(modules: list[nn.Module]) -> tuple[Any, Any]:
    return nullcontext(), _spare_buffers(modules)


@contextmanager
def _spare_buffers(modules: list[nn.Module]) -> Iterator[None]:
    """Send running statistics into copies, which are discarded, while activations are computed the second time."""
    holders = [holder for module in modules for holder in module.modules() if holder._buffers]
    kept = [(holder, dict(holder._buffers)) for holder in holders]
    for holder, buffers in kept:
        holder._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for holder, buffers in kept:
            holder._buffers.update(buffers)

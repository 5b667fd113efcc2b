"""What to do when memory runs out: smaller parts of a micro-batch, then activation checkpointing (D4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_MARK = "_computes_activations_twice"


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into memory."""

    chunk: int
    """Most samples that go through the model at once."""
    activation_checkpointing: bool


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's own exception, Python's, and the plain RuntimeError of torch's allocator on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def smaller(fit: Fit, floor: int) -> Fit | None:
    """The next thing to try: half as many samples at once, at the floor activation checkpointing, then nothing."""
    if fit.chunk > floor:
        return Fit(max(floor, fit.chunk // 2), fit.activation_checkpointing)
    return None if fit.activation_checkpointing else Fit(fit.chunk, True)


def chunks(count: int, size: int) -> list[slice]:
    """Consecutive parts of at most ``size`` of ``count`` samples."""
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def checkpoint_activations(model: nn.Module) -> None:
    """Compute the activations inside the model's blocks twice instead of keeping them. The random state is kept, so
    dropout and gradients are the same. Blocks are the members of lists of modules, else the model's own children."""
    for block in _blocks(model):
        if not getattr(block, _MARK, False):
            setattr(block, _MARK, True)
            block.forward = partial(_twice, block, block.forward)


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList) and len(module)]
    found = [child for parent in lists[:1] for child in parent.children()] or list(model.children())
    return [block for block in found if any(True for _ in block.parameters())]


def _twice(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (torch.is_grad_enabled() and block.training):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)

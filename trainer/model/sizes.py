"""The bytes of a model, for `trainer.performance.memory`: counted from its parameters, and measured for a sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from trainer.model.blocks import find_blocks, separate_blocks
from trainer.performance.memory import ModelBytes
from trainer.runtime.live_storages import peak_of


def model_bytes(module: nn.Module, sample: float | None = None) -> ModelBytes:
    """Return the bytes of a model, which may be without memory (device ``meta``). ``sample``: see `ModelBytes`."""
    blocks = separate_blocks(module, find_blocks(module))
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in blocks]
    parameters = list(module.parameters())
    whole = sum(parameter.nbytes for parameter in parameters)
    return ModelBytes(
        parameters=whole,
        trained=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        block=max(sizes, default=0),
        rest=whole - sum(sizes),
        sample=sample,
    )


def sample_bytes(run: Callable[[int], object], few: int, many: int) -> float:
    """Return what one more sample keeps in a pass. ``run`` makes a pass of this many samples on the CPU, with gradients
    that are there already."""
    low, high = (peak_of(partial(run, count)) for count in (few, many))
    return max(0.0, (high - low) / (many - few))

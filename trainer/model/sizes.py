"""The bytes of a model, for `trainer.performance.memory`: counted from its parameters, and measured for a sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainer.model.blocks import find_blocks, separate_blocks
from trainer.performance.memory import MOMENTS, ModelBytes


def model_bytes(module: nn.Module, sample: float | None = None, moments: float = MOMENTS) -> ModelBytes:
    """Return the bytes of a model, which may be without memory (device ``meta``). ``sample``, ``moments``: see
    `ModelBytes`."""
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
        moments=moments,
    )


def sample_bytes(run: Callable[[int], object], few: int, many: int) -> float:
    """Return what a pass keeps for its backward pass of one more sample. ``run`` makes a pass of this many samples."""
    return max(0.0, (kept_bytes(partial(run, many)) - kept_bytes(partial(run, few))) / (many - few))


def kept_bytes(run: Callable[[], object]) -> int:
    """Return the bytes of the tensors that autograd keeps while this runs one pass, parameters among them. What lives
    within an operation alone is not counted (`trainer.engine.memory_need` does)."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(kept.values())

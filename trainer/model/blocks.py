"""The repeated parts of a model: activations within them can be computed twice, which saves memory, and parameters of
each are gathered together where ranks share the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_MARK = "_computes_activations_twice"
LONG = 4
"""The most members of a `nn.Sequential` that counts as one block."""


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: members of lists of modules, or else a module's own parts; the module
    itself where it is one long row of layers."""
    found = [child for child in _members(module) if not _is_elementary(child)]
    if len(found) > 1:
        return found
    if is_long(module):
        return [module]
    return find_blocks(found[0]) if found else []


def is_long(module: nn.Module) -> bool:
    """Return whether a module is one long row of layers."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > LONG


def separate_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with the rest of the module: the others are gathered with the root."""
    if list(blocks) == [module]:  # a long row of layers
        blocks = list(module.children())
    uses = _uses(module)
    found = []
    for block in blocks:
        own = _uses(block)
        if own and all(uses[key] == count for key, count in own.items()) and not isinstance(block, nn.ModuleList):
            found.append(block)
    return found


def _uses(module: nn.Module) -> dict[int, int]:
    """Return how often each parameter is used, by its id."""
    uses: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # these have no forward of their own
            yield from _members(child)
        else:
            yield child


def _is_elementary(module: nn.Module) -> bool:
    own = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return own or not any(True for _ in module.parameters())


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
    if not any(holder._buffers for module in modules for holder in module.modules()):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)  # which `torch.compile` sees through
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

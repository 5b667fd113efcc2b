"""The repeated parts of a model: activations within them can be computed twice, and their parameters are gathered
together where ranks share the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

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

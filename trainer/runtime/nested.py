"""Values inside mappings, lists and tuples, as models and datasets nest them. torch's own functions are private."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what is in mappings, lists and tuples, at any depth, in their order."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for item in value:
        yield from leaves_of(item)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return mappings, lists, tuples and dataclasses of the same kinds with each leaf changed."""
    if isinstance(value, Mapping):
        parts = {key: map_leaves(change, item) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return parts
        made = copy.copy(value)  # with what it carries besides its items
        for key, part in parts.items():  # not `update`, which adds to a Counter
            made[key] = part
        return made
    if isinstance(value, list | tuple):
        items = [map_leaves(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if item.init]
        return replace(value, **{name: map_leaves(change, getattr(value, name)) for name in names})
    return change(value)


def find_odd_part(value: Any) -> Any | None:
    """Return the part of a value that is neither a tensor nor plain, as `torch.load` takes it with ``weights_only``;
    None where there is none."""
    if type(value) in (dict, OrderedDict, Counter):
        parts: Sequence[Any] = [*value, *value.values()]
    elif type(value) in (list, tuple):
        parts = value
    else:
        return None if type(value) in _PLAIN or isinstance(value, Tensor) else value
    return next((odd for part in parts if (odd := find_odd_part(part)) is not None), None)


_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.Size, torch.dtype, torch.device)

"""Values inside mappings, lists and tuples, as models and datasets nest them. torch's own functions are private."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any


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
        made.update(parts)
        return made
    if isinstance(value, list | tuple):
        items = [map_leaves(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if item.init]
        return replace(value, **{name: map_leaves(change, getattr(value, name)) for name in names})
    return change(value)

"""Values inside mappings, lists and tuples, as models and datasets nest them. torch's own functions are private."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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
    """Return mappings, lists and tuples of the same kinds with each leaf changed."""
    if isinstance(value, dict):
        made = copy.copy(value)  # with what it carries besides its items
        for key, item in value.items():
            made[key] = map_leaves(change, item)
        return made
    if isinstance(value, list):
        return [map_leaves(change, item) for item in value]
    if isinstance(value, tuple):
        items = [map_leaves(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)

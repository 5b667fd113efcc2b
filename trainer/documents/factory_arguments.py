"""The checks of a factory's arguments: bounded JSON data, in which no name is ever looked up."""

from __future__ import annotations

import math
from typing import Any

DEPTH, VALUES, TEXT = 8, 10_000, 100_000
"""Lists and maps within each other, values in all, and characters of all texts in all, at most."""


def check_arguments(arguments: Any) -> None:
    """Raise ValueError, which says where, for anything but null, truth values, finite numbers, texts, lists, and maps
    with texts as keys, and for data beyond the limits above."""
    values, characters = 0, 0
    waiting: list[tuple[str, Any, int]] = [("args", arguments, 0)]
    while waiting:
        where, value, depth = waiting.pop()
        values += 1
        if isinstance(value, dict):
            odd = [key for key in value if not isinstance(key, str)]
            if odd:
                raise ValueError(f"{where} has the key {odd[0]!r}; keys must be strings")
            characters += sum(map(len, value))
            waiting += [(f"{where}.{key}"[:200], each, depth + 1) for key, each in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(f"{where}[{number}]"[:200], each, depth + 1) for number, each in enumerate(value)]
        elif isinstance(value, str):
            characters += len(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which is not a finite number")
        elif value is not None and not isinstance(value, bool | int | float):
            raise ValueError(
                f"{where} is a {type(value).__name__}; arguments are data: null, true, false, numbers, strings, "
                "lists, maps. A function or a class is chosen inside the factory"
            )
        if depth > DEPTH or values + len(waiting) > VALUES or characters > TEXT:
            raise ValueError(
                f"{where} is too large: at most {DEPTH} levels, {VALUES:,} values and {TEXT:,} characters in all"
            )


def is_correction(value: object) -> bool:
    """Return whether a ``correction`` in a ``model.json``, the arguments of a loss that were found after the training
    (`trainer.model.losses`), is finite numbers by name. Pure."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(number, float) and math.isfinite(number) for name, number in value.items()
    )

"""What differs between two descriptions of a training, and which settings may change while it goes on. Pure.

A description is a document of JSON's types: a job as ``job.json`` has it, or what a checkpoint belongs to
(`trainer.engine.identity`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIXED = ("seed", "shuffle_block", "start_from", "start_sha256")
"""Settings of ``training`` that stay: the order of the samples of an epoch that has begun, and the first weights."""
_SHOWN = 200
"""Characters of a value in a sentence."""


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values of a document by their dotted names; lists count as values."""
    if isinstance(value, Mapping) and value:
        parts = [flatten(each, f"{name}.{part}" if name else str(part)) for part, each in value.items()]
        return {key: each for found in parts for key, each in found.items()}
    return {name: value}


def list_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (before, now) of each value that differs, by its dotted name, in the order of names; None stands for what
    is not there."""
    old, new = flatten(before), flatten(now)
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def describe_difference(name: str, before: Any, now: Any) -> str:
    """Return a difference in words, such as ``training.epochs = 12 (4 before)``."""
    return f"{name} = {show_value(now)} ({show_value(before)} before)"


def show_value(value: Any) -> str:
    """Return a value as a sentence shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def may_change(name: str) -> bool:
    """Return whether a field of a job, by its dotted name, may change when the job goes on."""
    section, _, field = name.partition(".")
    return section == "training" and field.partition(".")[0] not in FIXED

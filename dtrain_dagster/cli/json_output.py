"""The option ``--json``: one JSON document on standard output, or one on each line. Its fields are stable, and
docs/json.md tells them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import click


def json_option(help_text: str = "Print one JSON document instead.") -> Callable[..., Any]:
    """Return the option ``--json`` (parameter ``as_json``)."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print a document. Numbers that JSON does not have (NaN, infinity) are null. ``indent``: None prints one line."""
    click.echo(json.dumps(_finite(document), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

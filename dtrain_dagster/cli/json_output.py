"""The option ``--json``: one JSON document on standard output, or one on each line, whose fields are stable and
documented.

The documentation of the fields stands with the option, and `docs/generate_reference.py` prints it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import click


class JsonOption(click.Option):
    """An option ``--json``, with the fields of the document that it makes."""

    def __init__(self, *args: Any, fields: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields = dict(fields)
        """Name → meaning, in the form of `dtrain_dagster.cli.json_fields`; a document that is a list itself has fields
        that begin with ``[]``."""


def json_option(fields: Mapping[str, str], help_text: str = "Print one JSON document instead.") -> Callable[..., Any]:
    """Return the option ``--json`` (parameter ``as_json``) of a document with these fields, see `JsonOption.fields`."""
    return click.option("--json", "as_json", is_flag=True, cls=JsonOption, fields=fields, help=help_text)


def print_json(document: Any) -> None:
    """Print a document. Numbers that JSON does not have (NaN, infinity) are null."""
    click.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def print_json_line(document: Any) -> None:
    """Print a document on one line, at once: whoever reads it may follow something that grows."""
    click.echo(json.dumps(_finite(document), allow_nan=False))

"""What ``--json`` is documented to print, compared with what it printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from click.testing import CliRunner

from dtrain_dagster.cli.json_output import JsonOption, fields_of
from dtrain_dagster.cli.main import SECTIONS, load_command, main

TOLD = {
    f"dtrain {name}": option.fields
    for names in SECTIONS.values()
    for name in names
    for option in load_command(name).params
    if isinstance(option, JsonOption)
}
"""Words of a command → the fields that it documents."""
OF_LINES = {"dtrain logs"}
"""Commands that print a document per line."""


def printed(words: str, arguments: str = "", code: int = 0) -> Any:
    """The document that a command prints; of one that prints lines, the list of them."""
    done = CliRunner().invoke(main, [*words.split()[1:], *arguments.split(), "--json"])
    assert done.exit_code == code, done.output
    return [json.loads(line) for line in done.stdout.splitlines()] if words in OF_LINES else json.loads(done.stdout)


def fields_in(words: str, documents: Iterable[Any]) -> set[str]:
    """The fields of what a command printed, in several calls; those of a list as the fields of its items, where these
    are what is documented."""
    told = TOLD[words]
    found = set[str]()
    for document in documents:
        is_bare = isinstance(document, list) and not any(name.startswith("[]") for name in told)
        found |= set().union(*(fields_of(each, told) for each in document)) if is_bare else fields_of(document, told)
    return found

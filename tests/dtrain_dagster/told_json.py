"""What docs/json.md says that ``--json`` prints, compared with what it printed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dtrain_dagster.cli.main import main

_PAGE = Path(__file__).parents[2] / "docs" / "json.md"
_SECTIONS = dict(section.split("\n", 1) for section in _PAGE.read_text().split("\n## ")[1:])
TABLES = {
    words: {
        table.partition("\n")[0]: re.findall(r"^\| `([^`]+)`", table, re.MULTILINE) for table in section.split("\n### ")
    }
    for words, section in _SECTIONS.items()
}
"""Words of a command → title of a table, "" of the first → the fields that it documents."""
TOLD = {words: [name for names in tables.values() for name in names] for words, tables in TABLES.items()}
"""Words of a command → the fields that it documents. Items of a list of jobs have those of the first table of a status,
and fleets those of its table of a fleet."""
TOLD["dtrain jobs"] = [f"[].{name}" for table in ("", "Of a fleet") for name in TABLES["dtrain status"][table]]
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


def fields_of(document: Any, told: Collection[str], prefix: str = "") -> set[str]:
    """The names of a document's fields, as the page writes them. ``told``: the names that are
    documented; by them an object whose names are data is known. Pure."""
    if isinstance(document, list):
        return set().union(*(fields_of(item, told, f"{prefix}[]") for item in document))
    if not isinstance(document, Mapping):
        return set()
    found = set()
    for name, value in document.items():
        path = f"{prefix}.{name}" if prefix else name
        if f"{prefix}.*" in told and path not in told:
            path = f"{prefix}.*"
        found |= {path, *fields_of(value, told, path)}
    return found

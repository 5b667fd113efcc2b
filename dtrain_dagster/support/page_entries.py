"""The entries of an asset's page: at most ten in sight, and the rest of a page behind two links.

Dagster shows metadata as a table with a row for each entry, in a column that is about 260 pixels wide on a small
screen, and shows long Markdown and JSON behind a link. Programs read an entry by its name, wherever the page shows it.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

IN_SIGHT = 8
"""The entries that a page begins with; `MORE` and `FACTS` are the last two."""
MORE, FACTS = "more", "facts"
"""The entry with all further tables and Markdown, and the one with all values and tables of the page as data."""
COLUMNS = 3
"""The columns of a table that a page has room for: the first ones."""


def fit_page(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page with its first entries as they are; further tables, Markdown and links in one, and all values in
    another. Paths are no first entries: the UI does not break them, and cuts all lines at the side for one. Entries
    that Dagster itself reads stay."""
    own = [name for name in entries if not name.startswith("dagster/")]
    if len(own) <= IN_SIGHT + 2:
        return dict(entries)
    first = [name for name in own if not isinstance(entries[name], dg.PathMetadataValue | dg.JsonMetadataValue)]
    shown = {name: _fit(value) for name, value in entries.items() if name in first[:IN_SIGHT] or name not in own}
    sections = {name: text for name in first[IN_SIGHT:] if (text := _as_markdown(entries[name]))}
    facts = {name: _as_data(entries[name]) for name in own if not isinstance(entries[name], dg.MarkdownMetadataValue)}
    if sections:
        text = "\n\n".join(f"## {name.replace('_', ' ')}\n\n{text}" for name, text in sections.items())
        shown[MORE] = dg.MarkdownMetadataValue(text)
    return {**shown, FACTS: dg.JsonMetadataValue(facts)}


def read_entries(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a page by their names, also those in `FACTS`."""
    values = {name: _as_data(entry) for name, entry in metadata.items()}
    facts = values.pop(FACTS, None)
    return {**values, **(facts if isinstance(facts, dict) else {})}


def _fit(value: Any) -> Any:
    """Return a table with its first columns; anything else as it is."""
    if not isinstance(value, dg.TableMetadataValue):
        return value
    columns = value.schema.columns[:COLUMNS]
    records = [dg.TableRecord({each.name: record.data[each.name] for each in columns}) for record in value.records]
    return dg.TableMetadataValue(records, dg.TableSchema(columns))


def _as_data(value: Any) -> Any:
    """Return a value of JSON's types."""
    if isinstance(value, dg.TableMetadataValue):
        return [dict(record.data) for record in value.records]
    return value.value if isinstance(value, dg.MetadataValue) else value


def _as_markdown(value: Any) -> str:
    """Return what is for eyes only as Markdown; "" for a value."""
    if isinstance(value, dg.MarkdownMetadataValue):
        return value.value or ""
    if isinstance(value, dg.UrlMetadataValue):
        return f"<{value.value}>"
    if not isinstance(value, dg.TableMetadataValue):
        return ""
    names = [column.name for column in value.schema.columns]
    cells = [[str(record.data.get(name, "")).replace("|", "/") for name in names] for record in value.records]
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *cells])

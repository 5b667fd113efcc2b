"""The page of an asset in the order in which one reads: the verdict in a sentence, a picture, three figures, the ten
best rows, links, the large charts, and the rest. Dagster shows metadata in the order in which it is given.

A page is about 480 pixels wide beside its keys: tables have few columns, and files have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import table_schema

MOST_ROWS = 10
"""The most rows of a table on a page."""


def head_of_page(verdict: str, picture: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page begins with. ``picture``: Markdown of `dtrain_dagster.reports.small_pictures`, or "". Figures
    that are None are left out."""
    head: dict[str, Any] = {"verdict": verdict}
    if picture:
        head["picture"] = dg.MarkdownMetadataValue(picture)
    return head | {name: value for name, value in figures.items() if value is not None}


def best_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> dg.TableMetadataValue:
    """Return the first rows as a table. ``columns``: those that are shown; all, where none are given."""
    shown = [{name: row[name] for name in columns or row if name in row} for row in rows[:MOST_ROWS]]
    records = [dg.TableRecord(row) for row in shown]
    return dg.TableMetadataValue(records, table_schema(records))


def with_rest(rows: Sequence[Mapping[str, Any]], name: str, sums: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return at most `MOST_ROWS` rows, the last of which is the sum of all that have no row of their own. ``name``: the
    column that says so; ``sums``: those that are added up."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    kept, rest = rows[: MOST_ROWS - 1], rows[MOST_ROWS - 1 :]
    others: dict[str, Any] = dict.fromkeys(rows[0], "")
    others |= {name: f"{len(rest)} others"} | {column: sum(row[column] for row in rest) for column in sums}
    return [*kept, others]


def links(**addresses: str) -> dict[str, dg.UrlMetadataValue]:
    """Return the addresses that are pages of the web, as links that can be clicked."""
    return {
        name: dg.MetadataValue.url(address)
        for name, address in addresses.items()
        if address.startswith(("https://", "http://"))  # no javascript: in a link of the UI
    }

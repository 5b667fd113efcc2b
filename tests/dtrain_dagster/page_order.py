"""The order in which a page of an asset is read, and the sizes at which Dagster's UI shows it whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import MOST_ROWS
from dtrain_dagster.reports.small_pictures import SHOWN_IN_PLACE

HEAD = ["verdict", "picture", "figure", "figure", "figure", "table"]
MOST_COLUMNS = 7
"""The columns of a table that fit beside the keys of a page."""


def kind_of(name: str, value: Any) -> str:
    """What an entry of a page is to its reader."""
    plain = getattr(value, "value", value)
    if name == "verdict":
        return "verdict"
    if isinstance(value, dg.MarkdownMetadataValue):
        if name != "picture":
            return "link" if plain.startswith("[") else "words"
        return "picture" if len(plain) < SHOWN_IN_PLACE else "rest"
    kinds = {dg.TableMetadataValue: "table", dg.UrlMetadataValue: "link", dg.PathMetadataValue: "file"}
    return kinds.get(type(value), "figure" if isinstance(plain, int | float | str) else "rest")


def check_order(page: Mapping[str, Any], links: int) -> None:
    """Fail for a page that is not: verdict, picture, three figures, the best rows, this many links, the rest;
    and for a table that is cut off at its side or goes on for pages."""
    kinds = [kind_of(name, value) for name, value in page.items()]
    begin = [*HEAD, *["link"] * links]
    assert kinds[: len(begin)] == begin, dict(zip(page, kinds, strict=True))
    assert "link" not in kinds[len(HEAD) + links :]
    assert "file" in kinds, "which has all rows"
    for name, value in page.items():
        if isinstance(value, dg.TableMetadataValue):
            assert 0 < len(value.records) <= MOST_ROWS, name
            assert len(value.schema.columns) <= MOST_COLUMNS, name

"""An asset's page as tests read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain_dagster.support.page_entries import MORE, read_entries


class Page(dict[str, Any]):
    """The values of a page by their names. A chart or a text that is not in sight is read as the text of all those."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(read_entries(metadata))

    def __missing__(self, name: str) -> str:
        heading = f"## {name.replace('_', ' ')}\n\n"
        text = str(self.get(MORE, ""))
        if heading not in text:
            raise KeyError(name)
        return text.partition(heading)[2]

"""The searches of a home as they were kept: what each was asked for and has found. It reads, and asks nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dtrain_dagster.search import FOLDER
from dtrain_dagster.search.space import SpaceError

SEARCH, RESULT = "search.json", "result.json"
"""Files of a search's folder: what was asked for, and the whole result."""


def search_names(home: Path) -> list[str]:
    """Return the names of the searches of this home, the newest first."""
    found = [path.parent for path in (Path(home) / FOLDER).glob(f"*/{SEARCH}")]
    return [path.name for path in sorted(found, key=lambda path: (path / SEARCH).stat().st_mtime, reverse=True)]


def search_folder(home: Path, name: str) -> Path:
    """Return the folder of a search."""
    return home / FOLDER / name


def kept_search(home: Path, name: str) -> dict[str, Any] | None:
    """Return what was kept of a search when it began; None where there is none."""
    return _read(search_folder(home, name) / SEARCH, "choose another name, or remove the folder")


def kept_result(home: Path, name: str) -> dict[str, Any]:
    """Return what a search has found (`dtrain_dagster.search.results.result_document`). Raise `SpaceError` where it is
    not over."""
    found = _read(search_folder(home, name) / RESULT, "repeat the search, which writes it anew")
    if found is None:
        raise SpaceError(f"search {name} has no result yet: `dtrain status {name}` says how it goes")
    return found


def _read(path: Path, remedy: str) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SpaceError(f"{path} is damaged: {error}; {remedy}") from None
    return found if isinstance(found, dict) else None

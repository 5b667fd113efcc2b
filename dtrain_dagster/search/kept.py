"""The searches of a home as they were kept: their names, and what each has found. It reads, and asks nobody."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.search import FOLDER
from dtrain_dagster.search.space import SpaceError

SEARCH, RESULT = "search.json", "result.json"
"""Files of a search's folder: what was asked for, and the whole result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSearch:
    """A search of a home."""

    name: str
    state: Literal["running", "interrupted", "over"]
    """Whether an orchestrator runs it, none does although it is not over, or it is over."""
    began_at: float
    """Unix seconds."""
    jobs: int
    """Trials that were begun."""
    result: dict[str, Any] | None
    """What it found when it was last over, see `dtrain_dagster.search.results.result_document`; None before."""


def search_names(home: Path) -> list[str]:
    """Return the names of the searches of this home, the newest first."""
    found = [path.parent for path in (Path(home) / FOLDER).glob(f"*/{SEARCH}")]
    return [path.name for path in sorted(found, key=lambda path: (path / SEARCH).stat().st_mtime, reverse=True)]


def read_search(home: Path, name: str) -> KeptSearch:
    """Return what is kept of a search. Raise `SpaceError` for one that is not there or is damaged."""
    kept = kept_search(home, name)
    if kept is None:
        raise SpaceError(f"there is no search {name!r} in {home / FOLDER}")
    path = search_folder(home, name) / RESULT
    try:
        result = json.loads(path.read_text())
    except FileNotFoundError:
        result = None
    except ValueError as error:
        raise SpaceError(f"{path} is damaged: {error}; repeat the search, which writes it anew") from None
    fleet = FleetRecords(home, name)
    runs = fleet.is_there() and fleet.is_run()
    return KeptSearch(
        name=name,
        state="running" if runs else "interrupted" if result is None else "over",
        began_at=float(kept["began_at"]),
        jobs=len(fleet.entries()) if fleet.is_there() else 0,
        result=result,
    )


def search_folder(home: Path, name: str) -> Path:
    """Return the folder of a search."""
    return home / FOLDER / name


def kept_search(home: Path, name: str) -> dict[str, Any] | None:
    """Return what was kept of a search when it began; None where there is none."""
    path = search_folder(home, name) / SEARCH
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SpaceError(f"{path} is damaged: {error}; choose another name, or remove the folder") from None
    return found if isinstance(found, dict) else None

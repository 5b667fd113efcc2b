"""The records of generations in the storage: their names, and how they are written and read.

A generation of few members is stored for people: one object for each member. That of a large world is read by all its
members at the same moment, so it is stored by columns: each field once, with the values of all members, or with one
value where it is the same for all. For 256 members that is 12 kB instead of 54.
The members' views are left out of it: they have served when it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from itertools import repeat
from typing import Any

from trainer.documents import schemas
from trainer.documents.reader import DOCUMENT_BYTES, known_names, read_document
from trainer.elastic.candidacies import candidate_of
from trainer.elastic.generation import Candidate, Generation
from trainer.elastic.overlay import is_partial
from trainer.errors import DamagedError
from trainer.rundir import MEMBERSHIP
from trainer.storage.base import Storage

RECORD = re.compile(r"g\d{6,12}\.json")
_BESIDE = re.compile(RECORD.pattern + r"|g\d{6,12}(\.working)?")
_FIELDS = tuple(field.name for field in fields(Generation) if field.name != "members")
_LISTS = ("member", "node")
"""The columns that always are lists: readers count by them."""
_COLUMNS = tuple(field.name for field in fields(Candidate) if field.name != "view")


def path_of(number: int) -> str:
    """Return the name of the record of a generation in the run directory."""
    return f"{MEMBERSHIP}/g{number:06d}.json"


def records(storage: Storage) -> list[str]:
    """Return the names of the records of generations, oldest first."""
    names = known_names(storage, MEMBERSHIP, storage.list(MEMBERSHIP), _BESIDE)
    return [name for name in names if RECORD.fullmatch(name)]


def read_generation(storage: Storage, name: str) -> Generation:
    """Return the generation in ``membership/<name>``. Raise `DamagedError` if it is no record: the members that may
    train are then unknown."""
    data = read_document(storage, f"{MEMBERSHIP}/{name}", schemas.GENERATION, DOCUMENT_BYTES)
    if data is None:
        raise DamagedError(f"{storage.uri}/{MEMBERSHIP}/{name}", "it has just been removed")
    seats = data["members"]
    members = tuple(map(candidate_of, seats) if isinstance(seats, list) else _seats_of(seats))
    return Generation(**{key: data[key] for key in _FIELDS if key in data}, members=members)


def read_nodes(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return what an observer needs of the record ``membership/<name>``, None if it is not there: its ``number``,
    ``launch`` and ``formed_at``, and its ``nodes``. Raise `DamagedError` if it is no record."""
    data = read_document(storage, f"{MEMBERSHIP}/{name}", schemas.NODES_OF_GENERATION, DOCUMENT_BYTES)
    if data is None:
        return None
    seats = data["members"]
    nodes = [seat["node"] for seat in seats] if isinstance(seats, list) else seats["node"]
    return {name: data[name] for name in ("number", "launch", "formed_at")} | {"nodes": frozenset(nodes)}


def generations(storage: Storage) -> list[Generation]:
    """Return all generations, oldest first."""
    return [read_generation(storage, name) for name in records(storage)]


def text_of(generation: Generation) -> bytes:
    """Return a generation as it is stored."""
    if not is_partial(len(generation.members)):
        return json.dumps(asdict(generation), indent=1).encode()
    data: dict[str, Any] = {name: getattr(generation, name) for name in _FIELDS}
    columns = {name: [getattr(seat, name) for seat in generation.members] for name in _COLUMNS}
    data["members"] = {
        name: column[0] if name not in _LISTS and column.count(column[0]) == len(column) else column
        for name, column in columns.items()
    }
    return json.dumps(data).encode()


def _seats_of(columns: Mapping[str, Any]) -> Iterable[Candidate]:
    """Return the members of a record by columns, which has passed its check."""
    names = [name for name in _COLUMNS if name in columns]
    rows = zip(*(column if isinstance(column := columns[name], list) else repeat(column) for name in names))  # noqa: B905
    return (Candidate(**dict(zip(names, row, strict=True))) for row in rows)

"""The records of generations in the storage: their names, and how they are written and read.

A generation of few members is stored for people: one object for each member. That of a large world is read by all its
members at the same moment, so it is stored by columns: each field once, with the values of all members, or with one
value where it is the same for all. For 256 members that is 12 kB instead of 54.
The members' views are left out of it: they have served when it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import repeat
from typing import Any

from trainer.documents.reader import (
    DOCUMENT_BYTES,
    MARK_BYTES,
    known_names,
    parse_document,
    read_document,
    warn_once,
)
from trainer.documents.schemas import columns, count, either_list, make, moment, record, record_of, whole
from trainer.elastic.generation import Candidate, Generation, is_large
from trainer.errors import DamagedError
from trainer.rundir import MEMBERSHIP
from trainer.storage.base import Storage

RECORD = re.compile(r"g\d{6,12}\.json")
_BESIDE = re.compile(RECORD.pattern + r"|g\d{6,12}(\.working)?")
_FIELDS = tuple(field.name for field in fields(Generation) if field.name != "members")
_LISTS = ("member", "node")
"""The columns that always are lists: readers count by them."""
_COLUMNS = tuple(field.name for field in fields(Candidate) if field.name != "view")
_node = record({"node": count})
_NODES = record(
    {"number": whole(1), "launch": count, "formed_at": moment, "members": either_list(_node, columns("node", _node))}
)
"""The fields of a generation that an observer needs."""


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
    data = read_document(storage, f"{MEMBERSHIP}/{name}", record_of(Generation), DOCUMENT_BYTES)
    if data is None:
        raise DamagedError(f"{storage.uri}/{MEMBERSHIP}/{name}", "it has just been removed")
    seats = data["members"]
    members = tuple((make(Candidate, seat) for seat in seats) if isinstance(seats, list) else _seats_of(seats))
    return make(Generation, {name: data[name] for name in _FIELDS if name in data}, members=members)


def read_nodes(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return what an observer needs of the record ``membership/<name>``, None if it is not there: its ``number``,
    ``launch`` and ``formed_at``, and its ``nodes``. Raise `DamagedError` if it is no record."""
    data = read_document(storage, f"{MEMBERSHIP}/{name}", _NODES, DOCUMENT_BYTES)
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
    if not is_large(len(generation.members)):
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


CANDIDACY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.json")
"""A candidacy's file name, from the name of the member (`trainer.elastic.dynamic_rendezvous`). Files with other names
in these folders are ignored."""
_PLACE = re.compile(r"n(\d{1,9})p(\d{1,9})-")


class Candidacies:
    """The candidacies that the members of one launch file in a storage."""

    def __init__(self, storage: Storage, launch: int) -> None:
        self.storage, self.launch = storage, launch

    def submit(self, number: int, mine: Candidate) -> None:
        """Ask to be in a generation, or update the request."""
        self.storage.write(f"{_folder(number)}/{mine.member}.json", json.dumps(asdict(mine)).encode())

    def list_members(self, number: int) -> list[str]:
        """Return the members, of any launch, that have filed for a generation: first those of the first nodes, by what
        their names say."""
        names = known_names(self.storage, _folder(number), self.storage.list(_folder(number)), CANDIDACY)
        return sorted((name.removesuffix(".json") for name in names), key=place_of)

    def read(self, number: int, member: str) -> Candidate | None:
        """Return one candidacy; None where it is missing, of another launch, or cannot be read: its owner is then
        unknown and files it again."""
        try:
            return next(iter(self._read_each(number, [member])), None)
        except FileNotFoundError:
            return None

    def read_all(self, number: int, only: Collection[str] | None = None, but: Collection[str] = ()) -> list[Candidate]:
        """Return the candidates for a generation: of ``only`` these members (None: of all), and of none of ``but``. On
        remote storage several are read at a time."""
        names = [name for name in self.list_members(number) if (only is None or name in only) and name not in but]
        return list(self._read_each(number, names))

    def _read_each(self, number: int, members: Sequence[str]) -> Iterator[Candidate]:
        paths = [f"{_folder(number)}/{member}.json" for member in members]
        for member, path, data in zip(members, paths, self.storage.read_each(paths, MARK_BYTES * 16), strict=True):
            try:
                if isinstance(data, DamagedError):
                    raise data
                value = parse_document(data, f"{self.storage.uri}/{path}", record_of(Candidate))
            except DamagedError as error:
                warn_once(f"a candidacy is ignored: {error}")
                continue
            if value["launch"] == self.launch and value["member"] == member:
                yield make(Candidate, value)


def place_of(member: str) -> tuple[int, int, str]:
    """Return a key that sorts members by node and local rank, as their names tell them; others come last."""
    match = _PLACE.match(member)
    return (int(match[1]), int(match[2]), member) if match else (1 << 31, 0, member)


def _folder(number: int) -> str:
    return f"{MEMBERSHIP}/g{number:06d}"

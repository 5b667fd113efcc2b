"""Candidacies in the storage: their names, and how they are written and read."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from trainer.documents import schemas
from trainer.documents.reader import MARK_BYTES, known_names, read_document, warn_once
from trainer.elastic.generation import Candidate
from trainer.errors import DamagedError
from trainer.rundir import MEMBERSHIP
from trainer.storage.base import Storage

CANDIDACY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.json")
"""A candidacy's file name, from the name of the member (`trainer.elastic.dynamic_rendezvous`). Files with other names
in these folders are ignored."""
_PLACE = re.compile(r"n(\d{1,9})p(\d{1,9})-")
_FIELDS = tuple(field.name for field in fields(Candidate))


class Candidacies:
    """The candidacies that the members of one launch file in a storage."""

    def __init__(self, storage: Storage, launch: int) -> None:
        self.storage, self.launch = storage, launch

    def submit(self, number: int, mine: Candidate) -> None:
        """Ask to be in a generation, or update the request."""
        self.storage.write(f"{_folder(number)}/{mine.member}.json", json.dumps(document_of(mine)).encode())

    def list_members(self, number: int) -> list[str]:
        """Return the members, of any launch, that have filed for a generation: first those of the first nodes, by what
        their names say."""
        names = known_names(self.storage, _folder(number), self.storage.list(_folder(number)), CANDIDACY)
        return sorted((name.removesuffix(".json") for name in names), key=place_of)

    def read(self, number: int, member: str) -> Candidate | None:
        """Return one candidacy; None where it is missing, of another launch, or cannot be read: its owner is then
        unknown and files it again."""
        try:
            data = read_document(self.storage, f"{_folder(number)}/{member}.json", schemas.CANDIDATE, MARK_BYTES * 16)
        except DamagedError as error:
            warn_once(f"a candidacy is ignored: {error}")
            return None
        if data is None or data["launch"] != self.launch or data["member"] != member:
            return None
        return candidate_of(data)

    def read_all(self, number: int, only: Collection[str] | None = None, but: Collection[str] = ()) -> list[Candidate]:
        """Return the candidates for a generation: of ``only`` these members (None: of all), and of none of ``but``."""
        names = [name for name in self.list_members(number) if (only is None or name in only) and name not in but]
        return [item for name in names if (item := self.read(number, name)) is not None]


def document_of(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as a document."""
    return {name: getattr(candidate, name) for name in _FIELDS}


def candidate_of(data: dict[str, Any]) -> Candidate:
    """Return a candidate from a document that has passed its check; fields of later versions are left out."""
    return Candidate(**{key: data[key] for key in _FIELDS if key in data})


def place_of(member: str) -> tuple[int, int, str]:
    """Return a key that sorts members by node and local rank, as their names tell them; others come last."""
    match = _PLACE.match(member)
    return (int(match[1]), int(match[2]), member) if match else (1 << 31, 0, member)


def _folder(number: int) -> str:
    return f"{MEMBERSHIP}/g{number:06d}"

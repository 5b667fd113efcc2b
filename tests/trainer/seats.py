"""Candidates and generations, for tests of who is in."""

from __future__ import annotations

from typing import Any

from trainer.elastic.generation import Candidate, Generation


def seat(name: str, place: int = 0, **what: Any) -> Candidate:
    """A candidate that is ready, of launch 1."""
    fields: dict[str, Any] = {"node": place, "local_rank": 0, "launch": 1, "host": "h", "port": 1, "ready": True}
    return Candidate(member=name, **{**fields, "rank": place, **what})


def generation(names: str, number: int = 4, **what: Any) -> Generation:
    members = tuple(seat(name, place) for place, name in enumerate(names))
    return Generation(number=number, launch=1, members=members, **what)

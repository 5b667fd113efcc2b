"""Messages that members of a large world pass on to each other: each member passes on what is new to it, once.

Only what is known belongs here; the connections belong in `trainer.elastic.failure_detector`. A rumour wakes members
and says where to look. It decides nothing: what counts is the record in the storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AHEAD = 8
"""Generations beyond its own of which a member that is behind keeps rumours."""


class Rumours:
    """The rumours that this process has heard about its generation and later ones."""

    def __init__(self) -> None:
        self.number = 0
        """The generation of this process; rumours about older ones are no news."""
        self.formed = 0
        """The newest generation of which another has said that its record is written."""
        self._lost: dict[int, dict[str, str]] = {}
        """By generation: its members that others have lost, and how."""
        self.ways: dict[tuple[int, str], str] = {}
        """By the number of a generation and a member that gathers for it: the neighbour that told of it first, which
        is on a short way there, since messages come by all ways."""
        self._called_off: set[int] = set()
        """The generations that somebody has called off."""

    def begin(self, number: int) -> None:
        """Forget what is about generations before this one."""
        self.number = number
        self._lost = {key: lost for key, lost in self._lost.items() if key >= number}
        self.ways = {key: way for key, way in self.ways.items() if key[0] > number}
        self._called_off = {key for key in self._called_off if key >= number}

    def lost(self) -> Mapping[str, str]:
        """Return the members of the present generation that others have lost, each with the status that was told."""
        return dict(self._lost.get(self.number, {}))

    def take(self, message: Mapping[str, Any], sender: str = "") -> dict[str, Any] | None:
        """Note a message and return what of it is news and has to be passed on, None where nothing is. ``sender``: the
        neighbour that has sent it or passed it on."""
        number = message.get("formed")
        if isinstance(number, int):
            if number <= self.formed:
                return None
            self.formed = number
            return dict(message)
        number = message.get("regroup")
        if isinstance(number, int):
            if not self._concerns(number) or number in self._called_off:
                return None
            self._called_off.add(number)
            return dict(message)
        number, reader = message.get("gather"), message.get("by")
        if isinstance(number, int) and isinstance(reader, str):
            if not self._concerns(number - 1) or (number, reader) in self.ways:
                return None
            self.ways[number, reader] = sender
            return dict(message)
        number, lost = message.get("of"), message.get("lost")
        if not isinstance(number, int) or not isinstance(lost, dict) or not self._concerns(number):
            return None
        known = self._lost.setdefault(number, {})
        new = {str(member): str(view) for member, view in lost.items() if member not in known}
        known.update(new)
        return {**message, "lost": new} if new else None

    def _concerns(self, number: int) -> bool:
        return self.number <= number <= self.number + AHEAD

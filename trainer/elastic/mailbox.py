"""What other members have told this process, and whether it is passed on: shared by the thread of the connections
(`trainer.elastic.failure_detector`) and the one that trains.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainer.elastic.rumours import AHEAD, Rumours

RUMOURS = frozenset({"lost", "formed", "gather"})
"""The kinds of messages that only a large world knows."""
BACK = "back"
"""The field of a message that goes back on the ways of the letters to its sender, once to each of their writers."""


class Mailbox:
    """Messages, letters and rumours of one member, named ``me``. Any number of threads may use it."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.members: tuple[str, ...] = ()
        """The members of the present generation, in order of rank."""
        self.passes_on = False
        """Whether messages are passed on, and losses told: in a large world."""
        self.tells_losses = True
        """False while the end of a member is no loss."""
        self._rumours = Rumours()
        self._messages: list[dict[str, Any]] = []
        self._first_told: str | None = None
        """The first member by rank that was not lost when this member told losses last; None before."""
        self._letters: dict[str, dict[str, Any]] = {}
        self._writers: dict[int, set[str]] = {}
        """By the number of a generation: the neighbours from which letters for it have come, also those sent on."""
        self._news = threading.Event()
        self._lock = threading.Lock()

    def enter(self, number: int, members: Sequence[str], passes_on: bool) -> None:
        """From now on messages are about the generation of this number and its members, in order of rank.
        ``passes_on``: whether each member passes them on, since not everyone watches everyone."""
        with self._lock:
            self._rumours.begin(number)
            self._first_told = None
            self._writers = {key: names for key, names in self._writers.items() if key > number}
            self.members, self.passes_on = tuple(members), passes_on

    def told_losses(self) -> Mapping[str, str]:
        """Return the members of the generation that are said to be lost, with the status in which they were seen."""
        with self._lock:
            return self._rumours.lost()

    @property
    def told_formed(self) -> int:
        """The newest generation of which another member has said that its record is written."""
        return self._rumours.formed

    def take_messages(self) -> list[dict[str, Any]]:
        """Return the messages that have come since the last call."""
        with self._lock:
            taken, self._messages = self._messages, []
        return taken

    def catch_up(self, number: int) -> None:
        """Take messages to be about this generation from now on, where those known are of older ones."""
        with self._lock:
            if number > self._rumours.number:
                self._rumours.begin(number)

    def way_to(self, reader: str, number: int) -> str | None:
        """Return the neighbour over which letters reach a member that gathers for the generation of this number."""
        with self._lock:
            return self._rumours.ways.get((number, reader))

    def read_letters(self) -> dict[str, dict[str, Any]]:
        """Return the last letter of each writer."""
        with self._lock:
            return dict(self._letters)

    def wait_for_news(self, seconds: float) -> None:
        """Wait until a view changes, or a message or a letter comes: at most so many seconds. What came since the last
        call counts."""
        self._news.wait(seconds)
        self._news.clear()

    def notify(self) -> None:
        """Wake who waits for news."""
        self._news.set()

    def put_letter(self, letter: Mapping[str, Any], sender: str) -> str | None:
        """Keep a letter to this member in the place of an earlier one of its writer, and return None. Return the next
        one on the way of a letter to another; "" where none is known. ``sender``: the neighbour that has written it or
        sent it on. Raise ValueError for what is no letter."""
        reader, writer, number = letter.get("to"), letter.get("from"), letter.get("candidacy")
        if not isinstance(reader, str) or not isinstance(writer, str) or not isinstance(number, int):
            raise ValueError("it is not a letter")
        with self._lock:
            if 0 < number - self._rumours.number <= AHEAD:
                self._writers.setdefault(number, set()).add(sender)
        if reader != self.me:
            return self.way_to(reader, number) or ""
        with self._lock:
            self._letters[writer] = dict(letter)
        return None

    def tell(self, message: dict[str, Any]) -> bytes | None:
        """Return the line that tells a message of this member; None where the member has passed it on already."""
        with self._lock:
            if self._writers.get(message.get("formed", 0)):
                message = {**message, BACK: True}
            said = self._rumours.take(message) if self.passes_on else message
        return None if said is None else line_of({**said, "from": self.me})

    def tell_losses(self, seen: Mapping[str, str]) -> bytes | None:
        """Note the losses that this member has ``seen``. Return the line that tells what all have to know of these and
        of those that others have told: that there is a loss, and who is then the first by rank. None where all know.
        Of more losses at once, the one that gathers learns from the letters of those that have seen them."""
        with self._lock:
            if self.passes_on and self.tells_losses:
                mine = {member: view for member, view in seen.items() if member in self.members}
                self._rumours.take({"lost": mine, "of": self._rumours.number})
            lost = self._rumours.lost()
            first = next((member for member in self.members if member not in lost), "")
            if not (lost and self.passes_on) or first == self._first_told:
                return None
            self._first_told = first
            return line_of({"lost": lost, "of": self._rumours.number, "from": self.me})

    def hear(self, message: dict[str, Any], sender: str) -> tuple[bool, bytes | None]:
        """Take in a message that ``sender`` has sent or passed on. Return whether it is news, and the line that passes
        it on; None where it is not passed on, or as `tell_losses` says."""
        with self._lock:
            is_rumour = self.passes_on or not RUMOURS.isdisjoint(message)
            news = self._rumours.take(message, sender) if is_rumour else message
            if news is None:
                return False, None
            if RUMOURS.isdisjoint(news):
                self._messages.append(news)
            if not self.passes_on or news.get("of") == self._rumours.number:
                return True, None
        return True, line_of(news)

    def choose_readers(self, message: Mapping[str, Any], links: Collection[str]) -> Collection[str]:
        """Return those of the members with a connection to this one to whom a message goes on: all, but for one that
        goes back on the ways on which letters have come, and to those that are not in the generation."""
        if not message.get(BACK):
            return links
        with self._lock:
            writers = self._writers.get(message["formed"], set())
            return [name for name in links if name in writers or name not in self.members]


def line_of(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(message).encode() + b"\n"

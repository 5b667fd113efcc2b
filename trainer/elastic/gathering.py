"""Gathering the candidacies for one generation of a large world: who does it, and what each member does for it.

In a small world every member files its candidacy in the storage and reads all others. With N members that are N² reads
at every look. Here the first in line gathers: of the newest generation, the first by rank that is not known to be lost;
at a start, the first whose candidacy is filed. It says so, and the others send it theirs as a letter, back on the way
on which they heard of it. They file it in the storage where they are new, or where it does not act in time. Whoever has
had no turn for long joins in (`overlay.count_acting`), so nothing depends on one member, and the storage alone is
enough. Two may gather at once: the record that is created first counts (`trainer.elastic.membership`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from trainer.documents import schemas
from trainer.elastic.failure_detector import FailureDetector
from trainer.elastic.generation import Candidate
from trainer.elastic.generation_record import Candidacies, candidate_of, document_of, place_of
from trainer.elastic.overlay import TAKEOVER_SECONDS, count_acting, neighbours_of

READ_SECONDS, REMOTE_READ_SECONDS = 0.25, 1.0
"""Seconds between two listings of the candidacies."""
MOST_REREAD = 32
"""Announcements of members that prepare which one look reads again: their letters are faster."""
DIRECT_SECONDS = 1.0
"""Seconds after which the one that gathers is written to over a connection of its own, if no way to it is known."""
REWRITE_SECONDS = 0.1
"""Seconds after which a letter that has changed is sent again."""
VERIFY_SECONDS = 1.0
"""Seconds after which members that do not come, and that nobody calls lost, are tried by the one that gathers: then
they have a connection to it."""
MOST_VERIFIED = 16
"""Such members that are tried at a time."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a member that gathers has."""

    candidates: list[Candidate]
    view: Mapping[str, str]
    """The status of others: as this process sees them, else ``silent`` if another has told that they are lost."""
    is_in_doubt: bool
    """Whether a candidate is said to be lost and has not been tried yet."""


class Gathering:
    """This process's part in gathering for one generation. One thread uses it."""

    def __init__(
        self, candidacies: Candidacies, peers: FailureDetector, number: int, inside: tuple[Candidate, ...]
    ) -> None:
        """``inside``: the members of the generation that is followed, in order of rank; none at a start."""
        self.candidacies, self.peers, self.number, self.inside = candidacies, peers, number, inside
        self.read_seconds = READ_SECONDS if candidacies.storage.is_local else REMOTE_READ_SECONDS
        self._names = frozenset(seat.member for seat in inside)
        self._began = time.monotonic()
        self._first, self._first_since = "", self._began
        self._letters: dict[str, Candidate] = {}
        self._taken: dict[str, Mapping[str, Any]] = {}
        """The letters that have been read already."""
        self._stored: dict[str, Candidate] = {}
        self._seen_lost: dict[str, str] = {}
        """The members that the candidacies call lost, with how they saw them."""
        self._listed: list[str] = []
        self._listed_at = self._read_at = float("-inf")
        self._foreign: set[str] = set()
        """Members of another launch whose candidacies are in the same folder."""
        self._gone: set[str] = set()
        """Members that refused a connection, and from which no letter has come since."""
        self._sent: dict[str, tuple[str, Candidate, float]] = {}
        """What each member that gathers has been sent last, by which way, and when."""
        self._has_told = False
        """Whether this process has said that it gathers."""
        peers.mail.catch_up(number - 1)
        self._filed: Candidate | None = None
        self._is_filing = False
        self._reread = 0

    def look(self, mine: Candidate) -> tuple[Candidate, Gathered | None]:
        """Do what is due, and return this process's candidacy with its present view, and what it has gathered; None
        where that is not its part now. Raise OSError if storage fails."""
        now = time.monotonic()
        self._take_letters()
        own = self.peers.statuses()
        self._gone |= {member for member, view in own.items() if view == "gone"}
        self._gone -= {member for member, view in own.items() if view == "here"}
        told = self.peers.mail.told_losses()
        silent = {member for member, view in own.items() if view == "silent"}
        reached = {member for member, view in own.items() if view == "here"}
        linked = self.peers.linked()
        lost = self._gone | silent | (set(told) - reached - set(self._letters))
        acting = self._find_acting(mine, lost - {mine.member}, now)
        gathers = any(seat.member == mine.member for seat in acting)
        if gathers and not self._has_told and mine.member in self._names:
            self._has_told = True
            self.peers.broadcast({"gather": self.number, "by": mine.member})
        others = [seat for seat in acting if seat.member != mine.member]
        if mine.member in told and gathers:  # then others have another first one, which needs to hear from this process
            others += [seat for seat in self.inside if seat.member not in lost and seat not in acting][:1]
        near = neighbours_of(mine.member, self._names) if self.inside else frozenset()
        watched = [seat for seat in self.inside if seat.member in near]
        if gathers:
            told = {**self._seen_lost, **told}
        tried = self._choose_tried(told, now) if gathers else []
        ways = {seat.member: self._way_to(seat.member, linked, now) for seat in others}
        direct = [seat for seat in others if ways[seat.member] == seat.member and seat.member not in linked]
        self.peers.follow({seat.member: (seat.host, seat.port) for seat in [*watched, *direct, *tried]}, near)
        own = self.peers.statuses()
        mine = replace(mine, view=self._view(own, near | {seat.member for seat in direct}) if self.inside else {})
        if mine.member in self._names:
            self._write_letters(mine, ways, now)
        self._file(mine, silent, now)
        if not gathers:
            return mine, None
        self._read(now)
        return mine, self._gathered(mine, own, told)

    def _way_to(self, reader: str, linked: Collection[str], now: float) -> str:
        """Return the member to which a letter to ``reader`` goes next: itself where there is a connection to it, which
        it makes to those that it misses, or where no way is known in time; "" while one may still become known."""
        if reader in linked:
            return reader
        way = self.peers.mail.way_to(reader, self.number)
        if way in linked:
            return str(way)
        return reader if now - self._first_since >= DIRECT_SECONDS else ""

    def _write_letters(self, mine: Candidate, ways: Mapping[str, str], now: float) -> None:
        """Send the candidacy by these ways where it is new there; a changed one not at once, as it may change again:
        each neighbour that is lost makes it another one."""
        for reader, way in ways.items():
            before, sent, at = self._sent.get(reader, ("", None, 0.0))
            if way and (way != before or (sent != mine and now - at >= REWRITE_SECONDS)):
                letter = {"candidacy": self.number, "to": reader, "from": mine.member, "candidate": document_of(mine)}
                self.peers.write_letter(way, letter)
                self._sent[reader] = way, mine, now

    def _take_letters(self) -> None:
        for sender, letter in self.peers.mail.read_letters().items():
            if self._taken.get(sender) is letter:
                continue
            self._taken[sender] = letter
            if (candidate := read_letter(letter, sender, self.number)) is None:
                continue
            if candidate.launch == self.candidacies.launch and self._letters.get(sender) != candidate:
                self._letters[sender] = candidate
                self._gone.discard(sender)
                self._note_view(candidate)

    def _note_view(self, candidate: Candidate) -> None:
        lost = {name: view for name, view in candidate.view.items() if view in ("gone", "silent")}
        self._seen_lost |= {name: view for name, view in lost.items() if name in self._names}

    def _find_acting(self, mine: Candidate, lost: set[str], now: float) -> list[Candidate]:
        """Return the members whose turn to gather it is, in their order."""
        acting = self._first_of(self.inside, lost, now)
        if not acting:  # a start, or nobody of the newest generation is left
            acting = self._first_of(self._first_comers(mine, now), lost, now)
        return acting

    def _first_of(self, line: Iterable[Candidate], lost: set[str], now: float) -> list[Candidate]:
        found: list[Candidate] = []
        count = 1
        for seat in line:
            if seat.member in lost:
                continue
            if not found:
                if seat.member != self._first:
                    self._first, self._first_since = seat.member, now
                count = count_acting(now - self._first_since)
            found.append(seat)
            if len(found) >= count:
                break
        return found

    def _first_comers(self, mine: Candidate, now: float) -> Iterable[Candidate]:
        """Yield those that have filed and are in no generation, the first nodes first. Each is read once."""
        self._list(now, self.read_seconds if self._first == mine.member else 4 * self.read_seconds)
        names = {name for name in self._listed if name not in self._names} | {mine.member}
        for name in sorted(names, key=place_of):
            if name == mine.member:
                yield mine
            elif (seat := self._known(name)) is not None:
                yield seat

    def _known(self, name: str) -> Candidate | None:
        """Return a stored candidacy, which is read where it has not been yet."""
        if name not in self._stored and name not in self._foreign:
            self._store(name)
        return self._stored.get(name)

    def _store(self, name: str) -> None:
        if (found := self.candidacies.read(self.number, name)) is not None:
            if found != self._stored.get(name):
                self._gone.discard(name)
                self._note_view(found)
            self._stored[name] = found
        elif name not in self._stored:
            self._foreign.add(name)

    def _list(self, now: float, pause: float) -> bool:
        """List the candidacies where that is due after so many seconds; return whether it was."""
        if now - self._listed_at < pause:
            return False
        self._listed, self._listed_at = self.candidacies.list_members(self.number), now
        return True

    def _read(self, now: float) -> None:
        """Read what is new in the storage; again what members of the generation have filed, which nothing else brings,
        and some of those that were not ready."""
        if not self._list(now, self.read_seconds) and now - self._read_at < self.read_seconds:
            return
        self._read_at = now
        again = [name for name in self._listed if name in self._names]
        waiting = [
            name
            for name, seat in self._stored.items()
            if not seat.ready and name not in self._letters and name not in self._names
        ]
        start = self._reread % max(1, len(waiting))
        self._reread += MOST_REREAD
        for name in [*again, *(waiting[start:] + waiting[:start])[:MOST_REREAD]]:
            self._store(name)
        for name in self._listed:
            self._known(name)

    def _choose_tried(self, told: Mapping[str, str], now: float) -> list[Candidate]:
        """Return the members that this process tries to reach before it goes on without them: those that are said to be
        lost, newcomers, and after a while some that do not come."""
        come = {name for name, seat in self._stored.items() if seat.ready} | self._letters.keys()
        known = self.inside or tuple(self._stored.values())
        named = [
            seat
            for seat in known
            if (seat.member in self._gone and seat.member in come)
            or (seat.member in told and seat.member not in self._gone)
        ]
        if now - self._began > (VERIFY_SECONDS if self.inside else TAKEOVER_SECONDS):
            late = [seat for seat in known if seat.member not in come and seat.member not in self._gone]
            named += [seat for seat in late if seat.member not in told][:MOST_VERIFIED]
        if self.inside:
            named += [seat for name, seat in self._stored.items() if name not in self._names]
        return named

    def _view(self, own: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
        """Return the statuses that belong into the candidacy: those of neighbours and of the first in line."""
        return {
            name: "gone" if name in self._gone else own[name]
            for name in sorted(names)
            if name in self._gone or name in own
        }

    def _file(self, mine: Candidate, silent: set[str], now: float) -> None:
        """File the candidacy where letters may not bring it: those that gather may not know this process, or may not be
        reached by it."""
        if not self._is_filing:
            is_new = mine.member not in self._names
            passed_over = takewhile(lambda seat: seat.member != self._first, self.inside)
            is_cut_off = any(seat.member in silent for seat in passed_over)
            self._is_filing = is_new or is_cut_off or now - self._began >= TAKEOVER_SECONDS
        if self._filed is not None and "unknown" in mine.view.values():
            return  # connections are being made: one update is enough
        if self._is_filing and self._filed != mine:
            self.candidacies.submit(self.number, mine)
            self._filed = mine

    def _gathered(self, mine: Candidate, own: Mapping[str, str], told: Mapping[str, str]) -> Gathered:
        found = {**self._letters, mine.member: mine}
        for name, seat in self._stored.items():
            # A member that files although it knows who gathers does so because its letters may not arrive.
            if name != mine.member and (name not in found or (name in self._names and seat.ready)):
                found[name] = seat
        view = dict.fromkeys(told, "silent") | dict.fromkeys(self._gone, "gone")
        view |= {name: seen for name, seen in own.items() if seen != "unknown"}
        doubtful = any(name in found and own.get(name, "unknown") == "unknown" for name in told if name != mine.member)
        return Gathered(sorted(found.values(), key=lambda seat: place_of(seat.member)), view, doubtful)


def read_letter(letter: Mapping[str, Any], sender: str, number: int) -> Candidate | None:
    """Return the candidacy for a generation that a letter of this sender brings, None where it brings none."""
    data = letter.get("candidate")
    if letter.get("candidacy") != number or not isinstance(data, dict) or data.get("member") != sender:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if not schemas.CANDIDATE(data):
            return candidate_of(data)
    return None

"""Agreement on the members: a sequence of sets, each a *generation*, decided in the run directory's storage.

    membership/g000007/n1p0-3f9a2c01.json   a candidacy for generation 7, written by that process alone
    membership/g000007.json                 the generation: written once, so that exactly one proposal wins
    membership/g000007.working              rewritten now and then while others wait to join: it is at work

The storage is outside the nodes and arbitrates: its create-once files make two generations of one number impossible,
whatever the network between the nodes does. A process outside the newest generation is fenced out: it must not train,
and it may ask to come back as a newcomer. `trainer.elastic.generation.choose_generation` decides the members.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from trainer.documents import schemas
from trainer.documents.reader import DOCUMENT_BYTES, MARK_BYTES, known_names, read_document, warn_once
from trainer.elastic.failure_detector import FailureDetector
from trainer.elastic.generation import (
    Candidate,
    Generation,
    choose_generation,
    find_missing_members,
    proposal_delay,
    refuse_mixed_encryption,
    survivors_of,
)
from trainer.errors import DamagedError
from trainer.rundir import MEMBERSHIP
from trainer.runtime import clock
from trainer.storage.base import Storage

HURRY_SECONDS = 20.0
RECORD = re.compile(r"g\d{6,12}\.json")
CANDIDACY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.json")
"""A candidacy's file name, from the name of the member (`trainer.elastic.dynamic_rendezvous`). Files with other names
in these folders are ignored."""
_BESIDE = re.compile(RECORD.pattern + r"|g\d{6,12}(\.working)?")


class NoGenerationError(RuntimeError):
    """The members did not agree on a generation in time."""


@dataclass(slots=True)
class _Waiting:
    """The state of `Membership.agree_on_next` between two looks at the storage."""

    began: float
    at_work: tuple[int, bytes] | None = None
    """The newest generation, and what it last said of being at work."""
    heard_at: float = 0.0
    """The time at which that changed."""
    filed: tuple[int, Candidate] | None = None
    settled_at: float | None = None


class Membership:
    """This process's part in the agreement. One thread uses it, but for `read_newest` and `find_newcomers`."""

    def __init__(
        self, storage: Storage, peers: FailureDetector, launch: int, planned: int, limit: int, retries: int,
        patience: float, start_patience: float, first: int = 1,
    ) -> None:  # fmt: skip
        """Wait ``patience`` seconds for a member that is alive and does not come, and ``start_patience`` seconds for
        one of the planned world that has come and still prepares."""
        self.storage, self.peers = storage, peers
        self.launch, self.planned, self.limit, self.retries = launch, planned, limit, retries
        self.patience, self.start_patience = patience, start_patience
        self.first = first
        self.poll_seconds = 0.02 if storage.is_local else 0.3
        self.slow_poll_seconds = 0.02 if storage.is_local else 1.5
        """The pause once `HURRY_SECONDS` have passed: looks at remote storage cost money, and a wait of that length is
        for a member that is still preparing."""
        self.look_seconds = 1.0 if storage.is_local else 5.0
        """Between two looks of a generation at work (`find_requests`, `find_newcomers`, `is_over`)."""

    def read_newest(self) -> Generation | None:
        """Return the newest generation, which is the valid one, of any launch."""
        names = records(self.storage)
        return read_generation(self.storage, names[-1]) if names else None

    def read_candidates(self, number: int) -> list[Candidate]:
        """Return the candidates for a generation, of this launch. An unreadable candidacy is ignored: its owner is
        unknown and files it again."""
        folder = f"{MEMBERSHIP}/g{number:06d}"
        found = []
        for name in known_names(self.storage, folder, self.storage.list(folder), CANDIDACY):
            try:
                data = read_document(self.storage, f"{folder}/{name}", schemas.CANDIDATE, MARK_BYTES * 16)
            except DamagedError as error:
                warn_once(f"a candidacy is left alone: {error}")
                continue
            if data is not None and data["launch"] == self.launch and f"{data['member']}.json" == name:
                found.append(Candidate(**_fields(data)))
        return found

    def submit_candidate(self, number: int, mine: Candidate) -> None:
        """Ask to be in a generation, or update the request."""
        path = f"{MEMBERSHIP}/g{number:06d}/{mine.member}.json"
        self.storage.write(path, json.dumps(asdict(mine)).encode())

    def is_over(self, current: Generation) -> bool:
        """Return whether another generation has begun, so that ``current`` is fenced out."""
        try:
            self.storage.size(f"{MEMBERSHIP}/g{current.number + 1:06d}.json")  # numbers leave no gap
            return True
        except FileNotFoundError:
            return False

    def find_requests(self, current: Generation) -> list[Candidate]:
        """Return the members of ``current`` that want another generation: one that is cut off can ask only here."""
        inside = {seat.member for seat in current.members}
        return [item for item in self.read_candidates(current.number + 1) if item.ready and item.member in inside]

    def find_newcomers(self, current: Generation) -> list[Candidate]:
        """Return the candidates that could join ``current`` now: ready, seen by this process, and themselves
        seeing all its members. A file tells them that ``current`` is at work, even if they cannot reach it."""
        inside = {seat.member for seat in current.members}
        waiting = [
            item for item in self.read_candidates(current.number + 1) if item.ready and item.member not in inside
        ]
        if waiting:
            self.storage.write(_working(current.number), str(time.time()).encode())
        addresses = {seat.member: (seat.host, seat.port) for seat in [*current.members, *waiting]}
        self.peers.follow(addresses)
        seen = self.peers.statuses()
        return [
            item
            for item in waiting
            if seen.get(item.member) == "here" and all(item.view.get(member) == "here" for member in inside)
        ]

    def announce(self, mine: Candidate) -> None:
        """Announce that this process is coming, before it has its data and its model."""
        newest = self.read_newest()
        self.submit_candidate(newest.number + 1 if newest else self.first, replace(mine, ready=False))

    def agree_on_next(self, mine: Candidate, after: int, ended: Callable[[], None]) -> Generation:
        """Return a generation later than number ``after`` that includes this process: file a candidacy, wait for the
        others, propose if it is this process's turn, read the decision. A process that is left
        out goes on asking, as a newcomer without a state.

        ``ended`` is called now and then while waiting; it raises when the wait is pointless.
        Raise `NoGenerationError` if the storage cannot be used for as long as a member is waited for.
        """
        began = time.monotonic()
        state = _Waiting(began)
        works_at = began
        while True:
            try:
                generation, mine = self._look(mine, after, ended, state)
                if generation is not None:
                    return generation
                works_at = time.monotonic()
            except OSError as error:
                if time.monotonic() - works_at > self.patience:
                    raise NoGenerationError(f"{self.storage.uri}/{MEMBERSHIP} cannot be used: {error}") from error
            hurry = time.monotonic() - began < HURRY_SECONDS
            time.sleep(self.poll_seconds if hurry else self.slow_poll_seconds)

    def _look(
        self, mine: Candidate, after: int, ended: Callable[[], None], state: _Waiting
    ) -> tuple[Generation | None, Candidate]:
        """Look at the storage once, act on it and return (the generation to be in, this process's candidacy)."""
        newest = self.read_newest()
        if newest and newest.number > after and newest.rank_of(mine.member) is not None:
            return newest, mine
        ended()
        if after and (newest is None or newest.number < after):
            raise RuntimeError(
                f"{self.storage.uri}/{MEMBERSHIP} no longer holds generation {after}: the run directory was deleted or "
                "changed while the job ran; without its records it is unknown which processes may train"
            )
        if newest and mine.was_in and newest.number > after:
            mine = replace(mine, was_in=0, step=0, progress=0, reason="")  # fenced out
        number = newest.number + 1 if newest else self.first
        candidates = self.read_candidates(number)
        refuse_mixed_encryption(mine, newest, candidates)
        said = (newest.number, self._at_work(newest.number)) if newest else None
        if said != state.at_work:
            state.at_work, state.heard_at = said, time.monotonic()
        inside = newest.members if newest and newest.launch == self.launch else ()
        self.peers.follow({item.member: (item.host, item.port) for item in [*inside, *candidates]})
        mine = replace(mine, view=dict(sorted(self.peers.statuses().items())))
        if state.filed != (number, mine):
            self.submit_candidate(number, mine)
            state.filed, state.settled_at = (number, mine), None
            return None, mine
        # A process that refuses connections is dead, whatever it wrote before.
        alive = [item for item in candidates if mine.view.get(item.member) != "gone"]
        now = time.monotonic()
        if not self._settled(newest, mine, alive, now - state.began, now - state.heard_at):
            state.settled_at = None
            return None, mine
        if state.settled_at is None:
            state.settled_at = now
        if now - state.settled_at >= self._turn(newest, mine, alive):
            self._propose(newest, mine, alive)
        return None, mine

    def _settled(
        self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate], waited: float, quiet: float
    ) -> bool:
        """Return whether no member is left to wait for. ``waited``: seconds of waiting so far; ``quiet``: since the
        newest generation last said that it is at work."""
        ready = [item for item in candidates if item.ready]
        names = {item.member for item in ready}
        if mine.member not in names:
            return False
        if any(item.view.get(other, "unknown") == "unknown" for item in ready for other in names - {item.member}):
            return waited > self.patience  # a candidate has not tried yet to reach another
        view = self.peers.statuses()
        if newest is None or newest.launch != self.launch:
            late = find_missing_members(newest, self.launch, self.planned, candidates)
            late = [member for member in late if view.get(member) != "gone"]
            preparing = [member for member in late if not member.startswith("?")]
            return not late or waited > (self.start_patience if preparing else self.patience)
        inside = newest.rank_of(mine.member) is not None and mine.was_in == newest.number
        late = find_missing_members(newest, self.launch, self.planned, candidates)
        there = [member for member in late if view.get(member, "unknown") in ("here", "unknown")]
        silent = any(view.get(member) == "silent" for member in late)  # frozen, or one of us is cut off
        if inside and not there:
            # Members at work find this candidacy in the storage, and come: then it is known which links are cut.
            return not silent or waited > 1.5 * self.look_seconds
        if inside:
            return waited > self.patience
        # A newcomer waits to be admitted, and takes over only where no survivor is left.
        return not there and not survivors_of(newest, ready) and (not silent or quiet > self.patience)

    def _turn(self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate]) -> float:
        """Return the seconds until this process's turn to propose: in order of rank, so that usually one does."""
        ready = [item for item in candidates if item.ready]
        first = survivors_of(newest, ready) or sorted(ready, key=lambda item: (item.rank, item.member))
        place = next((index for index, item in enumerate(first) if item.member == mine.member), len(first))
        return proposal_delay(newest, ready, self.retries) + place * 5 * self.poll_seconds

    def _at_work(self, number: int) -> bytes:
        try:
            return self.storage.read_bounded(_working(number), MARK_BYTES)
        except (FileNotFoundError, DamagedError):
            return b""

    def _propose(self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate]) -> None:
        generation = choose_generation(
            newest, self.launch, candidates, self.retries, self.limit, mine.member, self.first
        )
        if generation is None:
            return
        text = json.dumps(asdict(replace(generation, formed_at=clock.now())), indent=1).encode()
        with contextlib.suppress(FileExistsError):  # another proposal was first, and counts
            self.storage.create(f"{MEMBERSHIP}/g{generation.number:06d}.json", text)


def _working(number: int) -> str:
    return f"{MEMBERSHIP}/g{number:06d}.working"


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
    members = tuple(Candidate(**_fields(seat)) for seat in data["members"])
    known = {key: data[key] for key in data.keys() & _GENERATION_FIELDS}
    return Generation(**{**known, "members": members})


def generations(storage: Storage) -> list[Generation]:
    """Return all generations, oldest first."""
    return [read_generation(storage, name) for name in records(storage)]


_CANDIDATE_FIELDS = frozenset(field.name for field in fields(Candidate))
_GENERATION_FIELDS = frozenset(field.name for field in fields(Generation))


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    return {key: data[key] for key in data.keys() & _CANDIDATE_FIELDS}

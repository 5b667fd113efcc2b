"""Agreement on the members: a sequence of sets, each a *generation*, decided in the run directory's storage.

    membership/g000007/n1p0-3f9a2c01.json   a candidacy for generation 7, written by that process alone
    membership/g000007.json                 the generation: written once, so that exactly one proposal wins
    membership/g000007.working              rewritten now and then while others wait to join: it is at work

The storage is outside the nodes and arbitrates: its create-once files make two generations of one number impossible,
whatever the network between the nodes does. A process outside the newest generation is fenced out: it must not train,
and it may ask to come back as a newcomer. `trainer.elastic.generation.choose_generation` decides the members.

In a small world everyone reads all candidacies. With N members that are N² reads at every look, so in a large one only
the first member by rank that is not lost reads them and proposes, and tells the others that the record is written; at a
start it is the first that has filed. Where it does not act, more join in (`count_acting`); the record that is created
first counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.documents.reader import MARK_BYTES
from trainer.elastic.failure_detector import FailureDetector
from trainer.elastic.generation import (
    COORDINATORS,
    Candidate,
    Generation,
    choose_generation,
    count_acting,
    find_missing_members,
    is_large,
    proposal_delay,
    refuse_mixed_encryption,
    survivors_of,
    watched_by,
)
from trainer.elastic.generation_record import Candidacies, path_of, read_generation, records, text_of
from trainer.elastic.peer_watch import PeerWatch
from trainer.errors import DamagedError, NoGenerationError
from trainer.rundir import MEMBERSHIP
from trainer.runtime import clock
from trainer.storage.base import Storage

HURRY_SECONDS = 20.0


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
    newest: Generation | None = None
    """The newest generation that was read."""
    known: dict[str, Candidate] = field(default_factory=dict)
    """The candidacies that were read, of the generation after `newest`."""
    reread_at: float = 0.0
    """When to read again what is known."""
    lost: set[str] = field(default_factory=set)
    """In a large world: members that this process could not reach, and has not seen since."""
    first: str = ""
    """In a large world: the first in line to propose, since `first_at`."""
    first_at: float = 0.0
    is_acting: bool = True
    """Whether it is this process's turn to read all candidacies and to propose."""
    look_at: float = 0.0
    """When to look for a newer record."""


class Membership:
    """This process's part in the agreement. One thread uses it; another one calls
    `is_over`, `find_requests` and `find_newcomers`."""

    def __init__(
        self, storage: Storage, peers: FailureDetector | PeerWatch, launch: int, planned: int, limit: int, retries: int,
        patience: float, start_patience: float, first: int = 1,
    ) -> None:  # fmt: skip
        """Wait ``patience`` seconds for a member that is alive and does not come, and ``start_patience`` seconds for
        one of the planned world that has come and still prepares."""
        self.storage, self.peers = storage, peers
        self.candidacies = Candidacies(storage, launch)
        self.launch, self.planned, self.limit, self.retries = launch, planned, limit, retries
        self.patience, self.start_patience = patience, start_patience
        self.first = first
        self.entered: Generation | None = None
        """The generation that this process takes part in."""
        self.poll_seconds = 0.02 if storage.is_local else 0.3
        self.slow_poll_seconds = 0.02 if storage.is_local else 1.5
        """The pause once `HURRY_SECONDS` have passed: looks at remote storage cost money, and a wait of that length is
        for a member that is still preparing."""
        self.look_seconds = 1.0 if storage.is_local else 5.0
        """Between two looks of a generation at work (`find_requests`, `find_newcomers`, `is_over`)."""
        self.record_seconds = 1.0 if storage.is_local else 2.0
        """Between two looks for a record where another gathers, which also tells that it has written one."""
        peers.expect(planned)

    def read_newest(self) -> Generation | None:
        """Return the newest generation, which is the valid one, of any launch."""
        names = records(self.storage)
        return read_generation(self.storage, names[-1]) if names else None

    def enter(self, generation: Generation) -> None:
        """Take part in a generation: watch its members, and take messages to be about it."""
        self.entered = generation
        self.peers.expect(len(generation.members))
        self.watch(generation)

    def watch(self, generation: Generation, waiting: Sequence[Candidate] = ()) -> None:
        """From now on watch those members of this generation that are this process's to watch, and those that are
        waiting. A parameter server watches all, and all watch it."""
        names = [seat.member for seat in generation.members]
        near = watched_by(self.peers.me, names)
        if generation.topology == "star":
            near = frozenset(names if self.peers.me == names[0] else {*near, names[0]})
        seats = [*(seat for seat in generation.members if seat.member in near), *waiting]
        self.peers.follow({seat.member: (seat.host, seat.port) for seat in seats})

    def is_over(self, current: Generation) -> bool:
        """Return whether another generation has begun, so that ``current`` is fenced out."""
        return self._exists(current.number + 1)  # numbers leave no gap

    def _exists(self, number: int) -> bool:
        try:
            self.storage.size(path_of(number))
            return True
        except FileNotFoundError:
            return False

    def find_requests(self, current: Generation) -> list[Candidate]:
        """Return the members of ``current`` that want another generation: one that is cut off can ask only here."""
        inside = [seat.member for seat in current.members]
        if is_large(len(inside)) and self.peers.me not in inside[:COORDINATORS]:
            return []  # the others hear of it from these
        found = self.candidacies.read_all(current.number + 1, only=set(inside))
        return [item for item in found if item.ready]

    def find_newcomers(self, current: Generation) -> list[Candidate]:
        """Return the candidates that could join ``current`` now: ready, seen by this process, and themselves seeing all
        its members that they would watch. A file tells them that ``current`` is at work, even if they cannot reach
        it."""
        inside = [seat.member for seat in current.members]
        found = self.candidacies.read_all(current.number + 1, but=set(inside))
        waiting = [item for item in found if item.ready]
        if waiting:
            self.storage.write(_working(current.number), str(time.time()).encode())
        self.watch(current, waiting)
        seen = self.peers.statuses()
        return [
            item
            for item in waiting
            if seen.get(item.member) == "here"
            and all(item.view.get(member) == "here" for member in watched_by(item.member, inside))
        ]

    def announce(self, mine: Candidate) -> None:
        """Announce that this process is coming, before it has its data and its model."""
        newest = self.read_newest()
        self.candidacies.submit(newest.number + 1 if newest else self.first, replace(mine, ready=False))

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
            self._pause(state)

    def _pause(self, state: _Waiting) -> None:
        """Wait until the next look: at the pace of the storage, or for the word that there is a record."""
        if state.is_acting:
            hurry = time.monotonic() - state.began < HURRY_SECONDS
            time.sleep(self.poll_seconds if hurry else self.slow_poll_seconds)
        else:
            self.peers.wait_for_news(self.record_seconds)

    def _look(
        self, mine: Candidate, after: int, ended: Callable[[], None], state: _Waiting
    ) -> tuple[Generation | None, Candidate]:
        """Look once, act on it and return (the generation to be in, this process's candidacy)."""
        now = time.monotonic()
        is_due = now >= state.look_at or self.peers.formed > (state.newest.number if state.newest else 0)
        if is_due:
            newest = self._read_after(state.newest or self.entered)
            if newest != state.newest:
                state.newest, state.known, state.first, state.lost = newest, {}, "", set()
        newest = state.newest
        if newest and newest.number > after and newest.rank_of(mine.member) is not None:
            return newest, mine
        if is_due:
            ended()
        if after and (newest is None or newest.number < after):
            raise RuntimeError(
                f"{self.storage.uri}/{MEMBERSHIP} no longer holds generation {after}: the run directory was deleted or "
                "changed while the job ran; without its records it is unknown which processes may train"
            )
        if newest and mine.was_in and newest.number > after:
            mine = replace(mine, was_in=0, step=0, progress=0, reason="")  # fenced out
        number = newest.number + 1 if newest else self.first
        inside = newest.members if newest and newest.launch == self.launch else ()
        large = is_large(len(inside) or self.planned)
        if is_due:
            state.look_at = now + (self.record_seconds if large else 0.0)
            said = (newest.number, self._at_work(newest.number)) if newest else None
            if said != state.at_work:
                state.at_work, state.heard_at = said, now
        acting = self._find_acting(number, inside, mine, state, now) if large else ()
        state.is_acting = not large or mine.member in acting
        if state.is_acting:
            self._read_candidacies(number, state, now, again=not large)
            seats = [*inside, *state.known.values()]
        else:
            near = {*watched_by(mine.member, [seat.member for seat in inside]), *acting}
            seats = [seat for seat in [*inside, *state.known.values()] if seat.member in near]
        refuse_mixed_encryption(mine, newest, state.known.values())
        self.peers.follow({seat.member: (seat.host, seat.port) for seat in seats})
        mine = replace(mine, view=dict(sorted(self.peers.statuses().items())))
        if state.filed != (number, mine) and not (
            # Of a large world, one update is enough once the connections are made.
            large and state.filed is not None and state.filed[0] == number and "unknown" in mine.view.values()
        ):
            self.candidacies.submit(number, mine)
            state.filed, state.settled_at = (number, mine), None
        elif state.is_acting:
            self._decide(newest, mine, list({**state.known, mine.member: mine}.values()), state)
        return None, mine

    def _find_acting(
        self, number: int, inside: Sequence[Candidate], mine: Candidate, state: _Waiting, now: float
    ) -> Sequence[str]:
        """Return the members of a large world whose turn to propose it is."""
        for member, view in self.peers.statuses().items():
            if view in ("gone", "silent"):
                state.lost.add(member)
            elif view == "here":
                state.lost.discard(member)
        line = [seat.member for seat in inside if seat.member not in state.lost]
        if not line:  # a start, or nobody of the newest generation is left
            names = {seat.member for seat in inside} | state.lost
            line = [name for name in self.candidacies.list_members(number) if name not in names]
        if line[:1] != [state.first]:
            state.first, state.first_at = "".join(line[:1]), now
        acting = line[: count_acting(now - state.first_at)]
        for name in set(acting) - {seat.member for seat in inside} - state.known.keys():
            if (found := self.candidacies.read(number, name)) is not None:
                state.known[name] = found
        return acting

    def _read_candidacies(self, number: int, state: _Waiting, now: float, again: bool) -> None:
        """Read the candidacies of all that are new; the others ``again`` at once, or every `look_seconds`, since they
        change."""
        if again or now >= state.reread_at:
            state.known, state.reread_at = {}, now + self.look_seconds
        state.known |= {seat.member: seat for seat in self.candidacies.read_all(number, but=state.known)}

    def _read_after(self, known: Generation | None) -> Generation | None:
        """Return the newest generation. After that of a large world, whose record is long, look only for those after
        the ``known`` one; its own must still be there."""
        if known is None or not is_large(len(known.members)) or not self._exists(known.number):
            return self.read_newest()
        while self._exists(known.number + 1):  # numbers leave no gap
            known = read_generation(self.storage, f"g{known.number + 1:06d}.json")
        return known

    def _decide(
        self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate], state: _Waiting
    ) -> None:
        """Propose the next generation where no member is left to wait for and it is this process's turn."""
        view = self.peers.statuses()
        # A process that refuses connections is dead, whatever it wrote before.
        alive = [item for item in candidates if view.get(item.member) != "gone"]
        now = time.monotonic()
        if not self._settled(newest, mine, alive, view, now - state.began, now - state.heard_at):
            state.settled_at = None
            return
        if state.settled_at is None:
            state.settled_at = now
        if now - state.settled_at >= self._turn(newest, mine, alive):
            self._propose(newest, mine, alive)
            state.look_at = 0.0

    def _settled(
        self,
        newest: Generation | None,
        mine: Candidate,
        candidates: Sequence[Candidate],
        view: Mapping[str, str],
        waited: float,
        quiet: float,
    ) -> bool:
        """Return whether no member is left to wait for. ``waited``: seconds of waiting so far; ``quiet``: since the
        newest generation last said that it is at work."""
        ready = [item for item in candidates if item.ready]
        names = {item.member for item in ready}
        if mine.member not in names:
            return False
        if not self._is_large(newest) and any(
            item.view.get(other, "unknown") == "unknown" for item in ready for other in names - {item.member}
        ):
            return waited > self.patience  # a candidate has not tried yet to reach another
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

    def _is_large(self, newest: Generation | None) -> bool:
        return is_large(len(newest.members) if newest and newest.launch == self.launch else self.planned)

    def _turn(self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate]) -> float:
        """Return the seconds until this process's turn to propose: in order of rank, so that usually one does. In a
        large world it is its turn already, as it acts for the others."""
        ready = [item for item in candidates if item.ready]
        if self._is_large(newest):
            return proposal_delay(newest, ready, self.retries)
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
        text = text_of(replace(generation, formed_at=clock.now()))
        with contextlib.suppress(FileExistsError):  # another proposal was first, and counts
            self.storage.create(path_of(generation.number), text)
        if self._is_large(newest):
            self.peers.broadcast({"formed": generation.number})


def _working(number: int) -> str:
    return f"{MEMBERSHIP}/g{number:06d}.working"

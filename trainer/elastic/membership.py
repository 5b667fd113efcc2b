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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer.documents.reader import MARK_BYTES
from trainer.elastic.failure_detector import FailureDetector
from trainer.elastic.gathering import Gathered, Gathering, read_letter
from trainer.elastic.generation import (
    Candidate,
    Generation,
    choose_generation,
    find_missing_members,
    proposal_delay,
    refuse_mixed_encryption,
    survivors_of,
)
from trainer.elastic.generation_record import Candidacies, path_of, read_generation, records, text_of
from trainer.elastic.overlay import is_partial, neighbours_of
from trainer.errors import DamagedError, NoGenerationError
from trainer.rundir import MEMBERSHIP
from trainer.runtime import clock
from trainer.storage.base import Storage

HURRY_SECONDS = 20.0
GATHER_SECONDS = 0.02
"""Between two looks of a member that gathers: letters cost nothing."""
MOST_LOOKING = 4
"""Members of a large world, the first by rank, that look for requests of others in the storage."""


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
    is_partial: bool = False
    """Whether the world is so large that few gather the candidacies for all."""
    look_at: float = 0.0
    """When to look for a newer record."""
    gathering: Gathering | None = None
    gathers: bool = True


class Membership:
    """This process's part in the agreement. One thread uses it, but for `read_newest` and `find_newcomers`."""

    def __init__(
        self, storage: Storage, peers: FailureDetector, launch: int, planned: int, limit: int, retries: int,
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

    def read_candidates(self, number: int) -> list[Candidate]:
        """Return the candidates for a generation, of this launch. An unreadable candidacy is ignored: its owner is
        unknown and files it again."""
        return self.candidacies.read_all(number)

    def enter(self, generation: Generation) -> None:
        """Take part in a generation: watch its members, and take messages to be about it."""
        self.entered = generation
        names = [seat.member for seat in generation.members]
        self.peers.enter(generation.number, names, is_partial(len(names)))
        self.watch(generation)

    def watch(self, generation: Generation, waiting: Sequence[Candidate] = ()) -> None:
        """From now on watch those members of this generation that are this process's to watch: all of a small one, few
        of a large one; and those that are waiting. A parameter server watches all, and all watch it."""
        names = [seat.member for seat in generation.members]
        near = neighbours_of(self.peers.me, names)
        if generation.topology == "star":
            near = frozenset(names if self.peers.me == names[0] else {*near, names[0]})
        seats = [*(seat for seat in generation.members if seat.member in near), *waiting]
        shared = near if is_partial(len(names)) else ()
        self.peers.follow({seat.member: (seat.host, seat.port) for seat in seats}, shared)

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
        if is_partial(len(inside)) and self.peers.me not in inside[:MOST_LOOKING]:
            return []  # the others hear of it from these
        found = self.candidacies.read_all(current.number + 1, only=set(inside))
        return [item for item in found if item.ready]

    def read_requests(self, current: Generation) -> list[Candidate]:
        """Return the members of ``current`` that have sent this process a letter with their candidacy for the next
        generation: it is to gather, and may not have heard why."""
        letters = self.peers.mail.read_letters().items()
        found = [read_letter(letter, sender, current.number + 1) for sender, letter in letters]
        return [item for item in found if item is not None and current.rank_of(item.member) is not None]

    def find_newcomers(self, current: Generation) -> list[Candidate]:
        """Return the candidates that could join ``current`` now: ready, seen by this process, and themselves seeing all
        its members that they would watch. A file tells them that ``current`` is at work, even if they cannot reach
        it."""
        inside = {seat.member for seat in current.members}
        found = self.candidacies.read_all(current.number + 1, but=inside)
        waiting = [item for item in found if item.ready]
        if waiting:
            self.storage.write(_working(current.number), str(time.time()).encode())
        self.watch(current, waiting)
        seen = self.peers.statuses()
        return [
            item
            for item in waiting
            if seen.get(item.member) == "here"
            and all(item.view.get(member) == "here" for member in neighbours_of(item.member, inside))
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
        """Wait until the next look: the pace of the storage where it is all there is, else that of the members."""
        if not state.is_partial:
            hurry = time.monotonic() - state.began < HURRY_SECONDS
            time.sleep(self.poll_seconds if hurry else self.slow_poll_seconds)
        elif state.gathers:
            time.sleep(GATHER_SECONDS)
        else:
            self.peers.mail.wait_for_news(self.record_seconds)

    def _look(
        self, mine: Candidate, after: int, ended: Callable[[], None], state: _Waiting
    ) -> tuple[Generation | None, Candidate]:
        """Look once, act on it and return (the generation to be in, this process's candidacy)."""
        now = time.monotonic()
        is_due = now >= state.look_at or self.peers.mail.told_formed > (state.newest.number if state.newest else 0)
        if is_due:
            state.newest = self._read_after(state.newest or self.entered, state.is_partial)
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
        state.is_partial = is_partial(len(inside) or self.planned)
        if is_due:
            state.look_at = now + (self.record_seconds if state.is_partial else 0.0)
            if not state.is_partial or mine.member not in {seat.member for seat in inside}:
                said = (newest.number, self._at_work(newest.number)) if newest else None
                if said != state.at_work:
                    state.at_work, state.heard_at = said, now
        if state.is_partial:
            if state.gathering is None or state.gathering.number != number:
                state.gathering, state.settled_at = Gathering(self.candidacies, self.peers, number, inside), None
            mine, found = state.gathering.look(mine)
            refuse_mixed_encryption(mine, newest, found.candidates if found else [])
        else:
            mine, found = self._read_all(number, inside, mine, state)
        refuse_mixed_encryption(mine, newest, found.candidates if found is not None else ())
        state.gathers = found is not None
        if found is not None:
            self._decide(newest, mine, found, state)
        return None, mine

    def _read_after(self, known: Generation | None, is_partial_world: bool) -> Generation | None:
        """Return the newest generation. In a large world, whose records are long, look for those after the ``known``
        one only; its own must still be there."""
        if known is None or not (is_partial_world or is_partial(len(known.members))) or not self._exists(known.number):
            return self.read_newest()
        while self._exists(known.number + 1):  # numbers leave no gap
            known = read_generation(self.storage, f"g{known.number + 1:06d}.json")
        return known

    def _read_all(
        self, number: int, inside: Sequence[Candidate], mine: Candidate, state: _Waiting
    ) -> tuple[Candidate, Gathered | None]:
        """In a small world, read the candidacies of all and watch all; file this process's own where it has changed."""
        candidates = self.read_candidates(number)
        refuse_mixed_encryption(mine, state.newest, candidates)
        self.peers.follow({item.member: (item.host, item.port) for item in [*inside, *candidates]})
        mine = replace(mine, view=dict(sorted(self.peers.statuses().items())))
        if state.filed != (number, mine):
            self.candidacies.submit(number, mine)
            state.filed, state.settled_at = (number, mine), None
            return mine, None
        return mine, Gathered(candidates, self.peers.statuses(), is_in_doubt=False)

    def _decide(self, newest: Generation | None, mine: Candidate, found: Gathered, state: _Waiting) -> None:
        """Propose the next generation where no member is left to wait for and it is this process's turn."""
        # A process that refuses connections is dead, whatever it wrote before.
        alive = [item for item in found.candidates if found.view.get(item.member) != "gone"]
        now = time.monotonic()
        if not self._settled(newest, mine, replace(found, candidates=alive), now - state.began, now - state.heard_at):
            state.settled_at = None
            return
        if state.settled_at is None:
            state.settled_at = now
        if now - state.settled_at >= self._turn(newest, mine, alive, state.is_partial):
            self._propose(newest, mine, alive, state.is_partial)
            state.look_at = 0.0

    def _settled(
        self, newest: Generation | None, mine: Candidate, found: Gathered, waited: float, quiet: float
    ) -> bool:
        """Return whether no member is left to wait for. ``waited``: seconds of waiting so far; ``quiet``: since the
        newest generation last said that it is at work."""
        candidates, view = found.candidates, found.view
        ready = [item for item in candidates if item.ready]
        names = {item.member for item in ready}
        if mine.member not in names:
            return False
        if found.is_in_doubt and waited <= 1.5 * self.look_seconds:
            return False
        if not is_partial(len(newest.members) if newest and newest.launch == self.launch else self.planned) and any(
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

    def _turn(
        self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate], is_alone: bool = False
    ) -> float:
        """Return the seconds until this process's turn to propose: in order of rank, so that usually one does.
        ``is_alone``: it is its turn already, as it gathers for the others."""
        ready = [item for item in candidates if item.ready]
        if is_alone:
            return proposal_delay(newest, ready, self.retries)
        first = survivors_of(newest, ready) or sorted(ready, key=lambda item: (item.rank, item.member))
        place = next((index for index, item in enumerate(first) if item.member == mine.member), len(first))
        return proposal_delay(newest, ready, self.retries) + place * 5 * self.poll_seconds

    def _at_work(self, number: int) -> bytes:
        try:
            return self.storage.read_bounded(_working(number), MARK_BYTES)
        except (FileNotFoundError, DamagedError):
            return b""

    def _propose(
        self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate], is_alone: bool
    ) -> None:
        generation = choose_generation(
            newest, self.launch, candidates, self.retries, self.limit, mine.member, self.first
        )
        if generation is None:
            return
        text = text_of(replace(generation, formed_at=clock.now()))
        with contextlib.suppress(FileExistsError):  # another proposal was first, and counts
            self.storage.create(path_of(generation.number), text)
        if is_alone:
            self.peers.broadcast({"formed": generation.number})


def _working(number: int) -> str:
    return f"{MEMBERSHIP}/g{number:06d}.working"

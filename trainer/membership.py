"""Who is in: one agreed set of members after the other, each a *generation*, decided in the run directory's storage.

    membership/g000007/n1p0-3f9a2c01.json   a candidacy for generation 7, written by that process alone
    membership/g000007.json                 the generation: written once, so that exactly one proposal wins

The storage is outside the nodes and arbitrates: its create-once files make two generations of one number impossible,
whatever the network between the nodes does. Who is not in the newest generation is fenced out: it may train nothing,
and it may ask to come back as a newcomer. Decisions are pure functions (`choose`, `missing`, `pause`); `Membership`
does the reading, writing and waiting.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from trainer.peers import Peers
from trainer.rundir import MEMBERSHIP
from trainer.storage import Storage

START = "start"
"""The reason of a launch's first generation."""
TOLD = "told by"
"""How the reason of a process begins that only heard of it."""
Topology = Literal["mesh", "star"]


class FencedError(RuntimeError):
    """This process is not in the newest generation: what it holds does not count."""


class NoGenerationError(RuntimeError):
    """No generation came about in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What a process says of itself when it asks to be in the next generation."""

    member: str
    node: int
    local_rank: int
    launch: int
    host: str
    port: int
    """Where its `Peers` listen."""
    store_port: int = 0
    """Where it would serve the group's store, or be the hub, as rank 0."""
    gpu: bool = False
    ready: bool = False
    """Data and model are there; until then it only says that it is coming."""
    was_in: int = 0
    """The generation that its state comes from, 0 for one that brings none."""
    rank: int = 0
    """In that generation; for a newcomer, the one that its launcher planned."""
    step: int = 0
    """Optimizer steps that its state has behind it."""
    progress: int = 0
    """Of two states at the same step, the one that is further in what follows a step (evaluation)."""
    chunk: int | None = None
    """Most samples that fit through its model at once; None: a whole micro-batch does (D4)."""
    activation_checkpointing: bool = False
    communication: bool = False
    """It comes because communication failed, not because a member is gone or a newcomer is there."""
    reason: str = ""
    view: dict[str, str] = field(default_factory=dict)
    """How it sees others (`trainer.peers.View`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A set of members that train together. Immutable once it is written."""

    number: int
    launch: int
    members: tuple[Candidate, ...]
    """In order of rank."""
    topology: Topology = "mesh"
    """``star``: parameter-server mode (D3), rank 0 is the hub."""
    attempt: int = 0
    """How often in a row communication has failed without a step in between."""
    step: int = 0
    """Steps done when it begins. What an older generation reports beyond this does not count."""
    reason: str = ""
    formed_at: float = 0.0

    def rank_of(self, member: str) -> int | None:
        return next((rank for rank, seat in enumerate(self.members) if seat.member == member), None)

    @property
    def source(self) -> int:
        """The rank whose state all others take: the furthest; the lowest of equals."""
        survivors = [rank for rank, seat in enumerate(self.members) if seat.was_in]
        return max(survivors, key=lambda rank: (*_position(self.members[rank]), -rank), default=0)

    @property
    def has_state(self) -> bool:
        """Does anybody bring a state? If not, all start from the latest checkpoint."""
        return any(seat.was_in for seat in self.members)

    @property
    def all_equal(self) -> bool:
        """Do all have the same state already?"""
        first = _position(self.members[0])
        return all(seat.was_in and _position(seat) == first for seat in self.members)

    @property
    def chunk(self) -> int | None:
        return min((seat.chunk for seat in self.members if seat.chunk is not None), default=None)

    @property
    def activation_checkpointing(self) -> bool:
        return any(seat.activation_checkpointing for seat in self.members)

    @property
    def gpu(self) -> bool:
        return all(seat.gpu for seat in self.members)


def _position(seat: Candidate) -> tuple[int, int]:
    return seat.step, seat.progress


def survivors_of(previous: Generation | None, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates with a state that counts: members of the newest generation, in the order of their ranks."""
    if previous is None:
        return []
    known = {seat.member for seat in previous.members}
    found = [item for item in candidates if item.member in known and item.was_in == previous.number]
    return sorted(found, key=lambda item: item.rank)


def missing(previous: Generation | None, launch: int, planned: int, candidates: Sequence[Candidate]) -> list[str]:
    """Whom a proposal has to wait for, unless they are gone: of the members of the newest generation those that have
    not come; at the start of a launch, names for those of the planned world that nobody has seen."""
    if previous is not None and previous.launch == launch:
        come = {item.member for item in candidates if item.ready}
        return [seat.member for seat in previous.members if seat.member not in come]
    of_launch = [item for item in candidates if item.launch == launch]
    late = [item.member for item in of_launch if not item.ready]
    return late + [f"?{number}" for number in range(planned - len(of_launch))]


def conflicts(candidates: Sequence[Candidate]) -> set[frozenset[str]]:
    """Pairs that cannot reach each other: one of them says so."""
    names = {item.member for item in candidates}
    return {
        frozenset((item.member, other))
        for item in candidates
        for other, view in item.view.items()
        if other in names and other != item.member and view in ("gone", "silent")
    }


def isolated(candidates: Sequence[Candidate]) -> set[str]:
    """Of three or more, those that nobody reaches: their host is cut off, no link between others is to blame. Nobody
    where that goes for all: one of them has to go on."""
    bad = conflicts(candidates)
    if len(candidates) < 3:
        return set()
    found = {item.member for item in candidates if sum(item.member in pair for pair in bad) == len(candidates) - 1}
    return found if len(found) < len(candidates) else set()


def attempts(previous: Generation | None, candidates: Sequence[Candidate]) -> int:
    """How often in a row communication has now failed among members that are all still there, without a step done."""
    survivors = survivors_of(previous, candidates)
    if previous is None or len(survivors) < len(previous.members):
        return 0
    if not any(item.communication for item in survivors):
        return 0
    progressed = any(item.step > previous.step for item in survivors)
    return 1 if progressed else previous.attempt + 1


def pause(previous: Generation | None, candidates: Sequence[Candidate], retries: int) -> float:
    """Seconds to wait before proposing: exponential backoff while communication fails (D3); as long as all the waits
    together where a link between two is cut, for it may come back."""
    count = attempts(previous, candidates)
    if count:
        return 0.5 * 2 ** (min(count, retries) - 1)
    left = [item for item in candidates if item.member not in isolated(candidates)]
    return 0.5 * (2**retries - 1) if conflicts(left) else 0.0


def choose(
    previous: Generation | None,
    launch: int,
    candidates: Sequence[Candidate],
    retries: int,
    limit: int,
    proposer: str = "",
    first: int = 1,
) -> Generation | None:
    """The next generation, from those who are ready; None if nobody is. Pure.

    Survivors keep their order, newcomers follow, at most ``limit`` in all. Where two cannot reach each other: who is
    cut off from all is left out; a star around somebody whom all reach, if there is one; else those with the most
    cut links are left out, never the ``proposer``, who is alive for certain. ``first``: the number of a generation
    that has none before it.
    """
    number = previous.number + 1 if previous else first
    ready = [item for item in candidates if item.ready and item.launch == launch]
    survivors = survivors_of(previous, ready)
    known = {item.member for item in survivors}
    newcomers = [replace(item, was_in=0) for item in ready if item.member not in known]
    newcomers.sort(key=lambda item: (item.node, item.local_rank, item.member))
    order = (survivors + newcomers)[: max(limit, len(survivors))]
    order = [item for item in order if item.member not in isolated(order)]
    if not order:
        return None
    attempt = attempts(previous, ready)
    topology: Topology = "star" if attempt > retries and len(order) > 1 else "mesh"
    bad = conflicts(order)
    if bad and len(order) > 2:
        hubs = [item for item in order if not any(item.member in pair for pair in bad)]
        if hubs:
            topology, order = "star", [hubs[0], *(item for item in order if item is not hubs[0])]
            bad = set()
    while bad:
        others = [item for item in order if item.member != proposer]
        worst = max(
            others,
            key=lambda item: (
                sum(item.member in pair for pair in bad),
                frozenset((item.member, proposer)) in bad,
                order.index(item),
            ),
        )
        order.remove(worst)
        bad = conflicts(order)
    step = max((item.step for item in order if item.was_in), default=0)
    reasons = dict.fromkeys(item.reason for item in survivors if item.reason and not item.reason.startswith(TOLD))
    return Generation(
        number=number,
        launch=launch,
        members=tuple(order),
        topology=topology,
        attempt=attempt,
        step=step,
        reason="; ".join(reasons) or (START if previous is None or previous.launch != launch else "no survivors"),
    )


@dataclass(slots=True)
class _Waiting:
    """Where `Membership.agree` stands between two looks."""

    began: float
    filed: tuple[int, Candidate] | None = None
    settled_at: float | None = None


class Membership:
    """This process's part in the agreement. One thread uses it, but for `newest` and `newcomers`."""

    def __init__(
        self, storage: Storage, peers: Peers, launch: int, planned: int, limit: int, retries: int, patience: float,
        start_patience: float, first: int = 1,
    ) -> None:  # fmt: skip
        """``patience``: seconds to wait for a member that is there and does not come; ``start_patience``: for one of
        the planned world that has come and still prepares."""
        self.storage, self.peers = storage, peers
        self.launch, self.planned, self.limit, self.retries = launch, planned, limit, retries
        self.patience, self.start_patience = patience, start_patience
        self.first = first
        self.poll_seconds = 0.02 if storage.is_local else 0.3

    def newest(self) -> Generation | None:
        """The generation that counts, of any launch."""
        names = [name for name in self.storage.list(MEMBERSHIP) if name.endswith(".json")]
        return read_generation(self.storage, names[-1]) if names else None

    def candidates(self, number: int) -> list[Candidate]:
        """Those who want to be in a generation, of this launch."""
        folder = f"{MEMBERSHIP}/g{number:06d}"
        found = []
        for name in self.storage.list(folder):
            data = _read(self.storage, f"{folder}/{name}")
            if data and data["launch"] == self.launch:
                found.append(Candidate(**data))
        return found

    def file(self, number: int, mine: Candidate) -> None:
        """Ask to be in a generation, or say it anew."""
        path = f"{MEMBERSHIP}/g{number:06d}/{mine.member}.json"
        self.storage.write(path, json.dumps(asdict(mine)).encode())

    def newcomers(self, current: Generation) -> list[Candidate]:
        """Candidates that could join ``current`` now: ready, and in sight of everybody whom they see and we see."""
        inside = {seat.member for seat in current.members}
        waiting = [item for item in self.candidates(current.number + 1) if item.ready and item.member not in inside]
        addresses = {seat.member: (seat.host, seat.port) for seat in [*current.members, *waiting]}
        self.peers.follow(addresses)
        seen = self.peers.view()
        return [
            item
            for item in waiting
            if seen.get(item.member) == "here" and all(item.view.get(member) == "here" for member in inside)
        ]

    def announce(self, mine: Candidate) -> None:
        """Say that this process is coming, before it has its data and its model."""
        newest = self.newest()
        self.file(newest.number + 1 if newest else self.first, replace(mine, ready=False))

    def agree(self, mine: Candidate, after: int, ended: Callable[[], None]) -> Generation:
        """Be in a generation later than number ``after``: file, wait for the others, propose if it is this process's
        turn, read what was decided. A process that is left out goes on asking, as a newcomer without a state.

        ``ended`` is called now and then while waiting; it raises when there is nothing left to wait for.
        Raises `NoGenerationError` when the storage cannot be used for as long as a member is waited for.
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
            time.sleep(self.poll_seconds)

    def _look(
        self, mine: Candidate, after: int, ended: Callable[[], None], state: _Waiting
    ) -> tuple[Generation | None, Candidate]:
        """One look at what there is, and what follows from it: (the generation to be in, this process's candidacy)."""
        newest = self.newest()
        if newest and newest.number > after and newest.rank_of(mine.member) is not None:
            return newest, mine
        ended()
        if after and (newest is None or newest.number < after):
            raise RuntimeError(
                f"{self.storage.uri}/{MEMBERSHIP} no longer holds generation {after}: the run directory was deleted or "
                "changed while the job ran; without its records nobody can tell who may train"
            )
        if newest and mine.was_in and newest.number > after:
            mine = replace(mine, was_in=0, step=0, progress=0, reason="")  # fenced out
        number = newest.number + 1 if newest else self.first
        candidates = self.candidates(number)
        inside = newest.members if newest and newest.launch == self.launch else ()
        self.peers.follow({item.member: (item.host, item.port) for item in [*inside, *candidates]})
        mine = replace(mine, view=dict(sorted(self.peers.view().items())))
        if state.filed != (number, mine):
            self.file(number, mine)
            state.filed, state.settled_at = (number, mine), None
            return None, mine
        # A process that refuses connections is dead, whatever it wrote before.
        alive = [item for item in candidates if mine.view.get(item.member) != "gone"]
        now = time.monotonic()
        if not self._settled(newest, mine, alive, now - state.began):
            state.settled_at = None
            return None, mine
        if state.settled_at is None:
            state.settled_at = now
        if now - state.settled_at >= self._turn(newest, mine, alive):
            self._propose(newest, mine, alive)
        return None, mine

    def _settled(
        self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate], waited: float
    ) -> bool:
        """Is there nobody left to wait for?"""
        ready = [item for item in candidates if item.ready]
        names = {item.member for item in ready}
        if mine.member not in names:
            return False
        if any(item.view.get(other, "unknown") == "unknown" for item in ready for other in names - {item.member}):
            return waited > self.patience  # somebody has not tried yet to reach somebody
        view = self.peers.view()
        if newest is None or newest.launch != self.launch:
            late = missing(newest, self.launch, self.planned, candidates)
            late = [member for member in late if view.get(member) != "gone"]
            preparing = [member for member in late if not member.startswith("?")]
            return not late or waited > (self.start_patience if preparing else self.patience)
        inside = newest.rank_of(mine.member) is not None and mine.was_in == newest.number
        late = missing(newest, self.launch, self.planned, candidates)
        there = [member for member in late if view.get(member, "unknown") in ("here", "unknown")]
        if inside:
            return not there or waited > self.patience
        # A newcomer waits to be let in, and takes over only where nobody is left who could.
        return not there and not survivors_of(newest, ready)

    def _turn(self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate]) -> float:
        """Seconds until it is this process's turn to propose: in order of rank, so that one usually does."""
        ready = [item for item in candidates if item.ready]
        first = survivors_of(newest, ready) or sorted(ready, key=lambda item: (item.rank, item.member))
        place = next((index for index, item in enumerate(first) if item.member == mine.member), len(first))
        return pause(newest, ready, self.retries) + place * 5 * self.poll_seconds

    def _propose(self, newest: Generation | None, mine: Candidate, candidates: Sequence[Candidate]) -> None:
        generation = choose(newest, self.launch, candidates, self.retries, self.limit, mine.member, self.first)
        if generation is None:
            return
        text = json.dumps(asdict(replace(generation, formed_at=time.time())), indent=1).encode()
        with contextlib.suppress(FileExistsError):  # somebody else was first; theirs counts
            self.storage.create(f"{MEMBERSHIP}/g{generation.number:06d}.json", text)


def read_generation(storage: Storage, name: str) -> Generation:
    """``membership/<name>``."""
    data = json.loads(storage.read(f"{MEMBERSHIP}/{name}"))
    return Generation(**{**data, "members": tuple(Candidate(**seat) for seat in data["members"])})


def generations(storage: Storage) -> list[Generation]:
    """The whole history, oldest first."""
    names = [name for name in storage.list(MEMBERSHIP) if name.endswith(".json")]
    return [read_generation(storage, name) for name in names]


def _read(storage: Storage, path: str) -> dict[str, Any] | None:
    try:
        return json.loads(storage.read(path))
    except FileNotFoundError:
        return None

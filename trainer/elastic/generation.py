"""The decision on the next set of members, from the candidates and their views of each other, and who watches whom.
Pure functions.

The agreement on it, with its reading, writing and waiting, belongs in `trainer.elastic.membership`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from trainer.documents.schemas import START, columns, either_list, matching, moment, record_of, whole
from trainer.errors import ConfigError

FULL_MESH = 16
"""Members up to which each watches every other one."""
COORDINATORS = 4
"""In a larger world: the members, first by rank, that watch all others and that all others watch."""
TAKEOVER_SECONDS = 3.0
"""Seconds that the first in line has for a proposal in a large world before the second joins in; then twice as many,
and so on."""
TOLD = "told by"
"""The beginning of the reason of a process that was told by another."""
Topology = Literal["mesh", "star"]
Port = Annotated[int, whole(0, 65535)]
_ENCRYPTS = {
    "": "does not encrypt its connections",
    "launch": "encrypts its connections with the launch's own certificates",
    "files": "encrypts its connections with the files of training.tls",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A process's description of itself when it asks to be in the next generation."""

    member: Annotated[str, matching(r"[A-Za-z0-9._-]{1,100}")]
    node: int
    local_rank: int
    launch: int
    host: str
    port: Port
    """The port at which its `FailureDetector` listens."""
    store_port: Port = 0
    """The port at which it would serve the group's store, or be the parameter server, as rank 0."""
    gpu: bool = False
    gpu_name: str = ""
    """What tells its GPU from all others (`trainer.comm.world.gpu_name`)."""
    certificates: Literal["", "launch", "files"] = ""
    """Where the certificates of its connections come from (`trainer.comm.encryption.CertificateSource`)."""
    ready: bool = False
    """Whether it has its data and model; until then it only announces itself."""
    was_in: int = 0
    """The generation that its state comes from, 0 for one that brings none."""
    rank: int = 0
    """In that generation; for a newcomer, the one that its launcher planned."""
    step: int = 0
    """Optimizer steps that its state has behind it."""
    progress: int = 0
    """Of two states at the same step, the higher one is further in the work after a step (evaluation)."""
    chunk: Annotated[int, whole(1)] | None = None
    """The most samples that fit through its model at once; None: a whole micro-batch does."""
    activation_checkpointing: bool = False
    communication: bool = False
    """Whether it asks because communication failed, not because a member is gone or a newcomer is there."""
    reason: str = ""
    view: dict[str, str] = field(default_factory=dict)
    """The states in which it sees others (`trainer.elastic.failure_detector.PeerStatus`)."""


_seats = either_list(record_of(Candidate), columns("member", record_of(Candidate)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A set of members that train together. Immutable once it is written."""

    number: Annotated[int, whole(1)]
    launch: int
    members: Annotated[
        tuple[Candidate, ...], either_list(record_of(Candidate), columns("member", record_of(Candidate)))
    ]
    """The members, in order of rank."""
    topology: Topology = "mesh"
    """The key on disk: ``mesh`` for all-reduce, ``star`` for parameter-server mode, in which rank 0 is the server."""
    attempt: int = 0
    """The number of communication failures in a row without a step in between."""
    step: int = 0
    """Steps done when it begins. What an older generation reports beyond this does not count."""
    reason: str = ""
    formed_at: Annotated[float, moment] = 0.0

    def rank_of(self, member: str) -> int | None:
        """Return the rank of a member, None where it is not in."""
        return next((rank for rank, seat in enumerate(self.members) if seat.member == member), None)

    @property
    def source(self) -> int:
        """The rank whose state all others take: the one with the most progress, the lowest of equals."""
        survivors = [rank for rank, seat in enumerate(self.members) if seat.was_in]
        return max(survivors, key=lambda rank: (*_position(self.members[rank]), -rank), default=0)

    @property
    def has_state(self) -> bool:
        """Whether any member brings a state. If not, all start from the latest checkpoint."""
        return any(seat.was_in for seat in self.members)

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks that do not have the state of `source` already."""
        furthest = _position(self.members[self.source])
        seats = enumerate(self.members)
        return tuple(rank for rank, seat in seats if not seat.was_in or _position(seat) != furthest)

    @property
    def chunk(self) -> int | None:
        """The most samples that fit through the model at once on every member; None if a whole micro-batch fits."""
        return min((seat.chunk for seat in self.members if seat.chunk is not None), default=None)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether any member needs activation checkpointing."""
        return any(seat.activation_checkpointing for seat in self.members)

    @property
    def gpu(self) -> bool:
        """Whether all members have a GPU."""
        return all(seat.gpu for seat in self.members)


def _position(seat: Candidate) -> tuple[int, int]:
    return seat.step, seat.progress


def is_large(members: int) -> bool:
    """Return whether so many members are too many for each to watch every other one."""
    return members > FULL_MESH


def watched_by(member: str, members: Sequence[str]) -> frozenset[str]:
    """Return those of ``members``, which are in order of rank, that ``member`` watches: all others, in a large world
    only the coordinators, unless it is one. A newcomer, which is not among them, watches as the last one does."""
    first = members[:COORDINATORS]
    return frozenset(first if is_large(len(members)) and member not in first else members) - {member}


def count_acting(waited_seconds: float) -> int:
    """Return how many in line may propose after the first of them has had so many seconds: one, two after
    `TAKEOVER_SECONDS`, and one more each time that as long has passed again. So a line of any length has its turn, and
    few act at a time."""
    count, due = 1, TAKEOVER_SECONDS
    while waited_seconds >= due:
        count, due = count + 1, 2 * due
    return count


def survivors_of(previous: Generation | None, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates whose state counts: members of the newest generation, in the order of their ranks."""
    if previous is None:
        return []
    known = {seat.member for seat in previous.members}
    found = [item for item in candidates if item.member in known and item.was_in == previous.number]
    return sorted(found, key=lambda item: item.rank)


def find_missing_members(
    previous: Generation | None, launch: int, planned: int, candidates: Sequence[Candidate]
) -> list[str]:
    """Return the members that a proposal has to wait for, unless they are gone: those of the newest generation that
    have not come; at the start of a launch, names for the unseen members of the planned world."""
    if previous is not None and previous.launch == launch:
        come = {item.member for item in candidates if item.ready}
        return [seat.member for seat in previous.members if seat.member not in come]
    of_launch = [item for item in candidates if item.launch == launch]
    late = [item.member for item in of_launch if not item.ready]
    return late + [f"?{number}" for number in range(planned - len(of_launch))]


def refuse_mixed_encryption(mine: Candidate, newest: Generation | None, candidates: Iterable[Candidate]) -> None:
    """Raise `ConfigError` if another member of this launch encrypts its connections differently: neither could reach
    the other. The newest generation decides, so that a newcomer stops none of its members; at the start of a launch,
    all candidates do."""
    others = newest.members if newest is not None and newest.launch == mine.launch else candidates
    for other in others:
        if other.launch == mine.launch and other.certificates != mine.certificates:
            raise ConfigError(
                f"this process, {mine.member} at {mine.host}, {_ENCRYPTS[mine.certificates]}, and {other.member} at "
                f"{other.host} {_ENCRYPTS[other.certificates]}: training.encryption, training.tls and the launch's "
                "secret must be the same on all nodes, and no node may use a loopback address (DTRAIN_HOST)"
            )


def find_unreachable_pairs(candidates: Sequence[Candidate]) -> set[frozenset[str]]:
    """Return the pairs of which at least one reports that it cannot reach the other."""
    names = {item.member for item in candidates}
    return {
        frozenset((item.member, other))
        for item in candidates
        for other, view in item.view.items()
        if other in names and other != item.member and view in ("gone", "silent")
    }


def find_isolated_members(candidates: Sequence[Candidate]) -> set[str]:
    """Return, of three or more candidates, those that no other reaches: their host is cut off, not a single link. In a
    large world, where few watch each, those that none of these reaches. Return none if that is true of all: one of them
    has to go on."""
    bad = find_unreachable_pairs(candidates)
    if len(candidates) < 3 or not bad:
        return set()
    failed = Counter(member for pair in bad for member in pair)
    tried = dict.fromkeys(failed, len(candidates) - 1)
    if is_large(len(candidates)):
        names = {item.member for item in candidates}
        pairs = {
            frozenset((item.member, other))
            for item in candidates
            for other, view in item.view.items()
            if other in names and view != "unknown"
        }
        tried = Counter(member for pair in pairs for member in pair)
    found = {member for member, count in failed.items() if count == tried[member]}
    return found if len(found) < len(candidates) else set()


def count_failed_attempts(previous: Generation | None, candidates: Sequence[Candidate]) -> int:
    """Return how often in a row communication has failed among members that are all still there, without a step."""
    survivors = survivors_of(previous, candidates)
    if previous is None or len(survivors) < len(previous.members):
        return 0
    if not any(item.communication for item in survivors):
        return 0
    progressed = any(item.step > previous.step for item in survivors)
    return 1 if progressed else previous.attempt + 1


def proposal_delay(previous: Generation | None, candidates: Sequence[Candidate], retries: int) -> float:
    """Return the seconds to wait before proposing: exponential backoff while communication fails; the sum of all these
    waits where a link between two members is cut, because it may come back."""
    count = count_failed_attempts(previous, candidates)
    if count:
        return 0.5 * 2 ** (min(count, retries) - 1)
    isolated = find_isolated_members(candidates)
    left = [item for item in candidates if item.member not in isolated]
    return 0.5 * (2**retries - 1) if find_unreachable_pairs(left) else 0.0


def choose_generation(
    previous: Generation | None,
    launch: int,
    candidates: Sequence[Candidate],
    retries: int,
    limit: int,
    proposer: str = "",
    first: int = 1,
) -> Generation | None:
    """Return the next generation from the ready candidates, None if none is ready. Pure.

    Survivors keep their order, newcomers follow, at most ``limit`` in all. Where two cannot reach each other, a member
    that is cut off from all is left out. Then parameter-server mode is used over a member that all reach, if there is
    one; else the members with the most cut links are left out, never the ``proposer``, which is certainly alive.
    ``first``: the number of a generation without a predecessor.
    """
    number = previous.number + 1 if previous else first
    ready = [item for item in candidates if item.ready and item.launch == launch]
    survivors = survivors_of(previous, ready)
    known = {item.member for item in survivors}
    newcomers = [replace(item, was_in=0) for item in ready if item.member not in known]
    newcomers.sort(key=lambda item: (item.node, item.local_rank, item.member))
    order = (survivors + newcomers)[: max(limit, len(survivors))]
    isolated = find_isolated_members(order)
    order = [item for item in order if item.member not in isolated]
    if not order:
        return None
    attempt = count_failed_attempts(previous, ready)
    topology: Topology = "star" if attempt > retries and len(order) > 1 else "mesh"
    bad = find_unreachable_pairs(order)
    if bad and len(order) > 2:
        servers = [item for item in order if not any(item.member in pair for pair in bad)]
        if servers:
            topology, order = "star", [servers[0], *(item for item in order if item is not servers[0])]
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
        bad = find_unreachable_pairs(order)
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

"""`PieceWork`: a computation in pieces, which ranks share, interrupt between two pieces and continue in another world.

What a rank has done stays with it: a lost rank costs its pieces, and nobody else's. Before each round all ranks tell
what they have, so a rank that has just come, or that missed a round, takes up the work where the others are. The result
is the same bit for bit at any number of ranks if each piece is, and if sums of pieces are exact: pieces either fill
places of their own, or are rounded to a grid (`on_grid`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer.evaluation.shared_work import SharedWork

Array = NDArray[np.float64]
GRID = 2.0**-30
"""Sums of multiples of it are exact in any order as long as they stay below 2**23. Sums over standardised features stay
near the number of samples, of which `trainer.data.sampler.MOST_JUDGED`, 2**19, are looked at."""
ALL = 1 << 30
"""More pieces than any stage has."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a computation, in pieces that can be done in any order."""

    pieces: int
    shape: tuple[int, ...]
    """Of the sum over all pieces."""
    add: Callable[[int, Array], object]
    """Adds a piece, named by its number, to a sum, in place."""
    finish: Callable[[Array], Array]
    """Returns the result, with which the next stage begins, from the sum over all pieces. It may not change the sum."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What one rank has, and what it would do."""

    stage: int
    shape: tuple[int, ...]
    """Of the result with which its stage begins."""
    pieces: int
    """Of its stage; 0 after the last one."""
    held: tuple[int, ...]
    """The pieces of its stage that it has done."""
    most: int
    """The most pieces that it would do in this round."""
    goes_on: bool = True


@dataclass(frozen=True, slots=True)
class Round:
    """What follows from the standings of all ranks."""

    stage: int
    source: int
    """The rank from which those behind take the result that the stage begins with."""
    behind: tuple[int, ...]
    dropped: tuple[int, ...]
    """Ranks whose pieces do not count, because others have done some of them: they forget all theirs."""
    is_complete: bool
    """Whether all pieces of the stage have been done."""
    pieces: tuple[tuple[int, ...], ...]
    """What each rank does."""


def plan_round(standings: Sequence[Standing]) -> Round:
    """Return the round that follows from what all ranks have, in order of rank. Pure."""
    stage = max(each.stage for each in standings)
    at = [rank for rank, each in enumerate(standings) if each.stage == stage]
    held: set[int] = set()
    dropped = []
    for rank in at:
        if held.isdisjoint(standings[rank].held):
            held.update(standings[rank].held)
        else:
            dropped.append(rank)
    left = [piece for piece in range(standings[at[0]].pieces) if piece not in held]
    workers = [rank for rank, each in enumerate(standings) if each.most]
    shares: list[tuple[int, ...]] = [()] * len(standings)
    for place, rank in enumerate(workers):
        first, last = (len(left) * end // len(workers) for end in (place, place + 1))
        shares[rank] = tuple(left[first:last][: standings[rank].most])
    behind = tuple(rank for rank, each in enumerate(standings) if each.stage < stage)
    return Round(stage, at[0], behind, tuple(dropped), not left, tuple(shares))


def on_grid(values: NDArray[np.floating]) -> Array:
    """Return the values as multiples of `GRID`."""
    return np.rint(values.astype(np.float64) / GRID) * GRID


@dataclass(slots=True)
class PieceWork:
    """A computation in stages: each is made from the result of the one before, the first from an empty array."""

    stages: Sequence[Callable[[Array], Stage]]
    _at: int = 0
    _result: Array = field(default_factory=lambda: np.zeros(0))
    _stage: Stage | None = None
    _sum: Array = field(default_factory=lambda: np.zeros(0))
    _held: list[int] = field(default_factory=list)

    def complete(self, work: SharedWork) -> Array:
        """Return the result after what is left has been done, by all ranks. A collective; the ranks may come to it at
        very different times."""
        self.advance(work)
        return self._result

    def advance(
        self, work: SharedWork, goes_on: Callable[[], bool] | None = None, is_worker: bool = True
    ) -> bool:  # fmt: skip
        """Work in rounds until all is done, or until ``goes_on`` is false on any rank, and return whether all is done.
        A collective. With ``goes_on`` a rank does one piece in a round, so that the end is soon; it may wait a little.
        ``is_worker``: whether this rank does pieces. A `trainer.comm.group.GroupError` leaves what was done."""
        while True:
            self._enter_stage()
            told = work.gather(self._standing(goes_on, is_worker), is_patient=goes_on is None)
            standings = [Standing(each[0], tuple(each[1]), each[2], tuple(each[3]), *each[4:]) for each in told]
            plan = plan_round(standings)
            if plan.behind:
                self._catch_up(plan, standings, work)
            if plan.stage == len(self.stages):
                return True
            if work.rank in plan.dropped:
                self._forget()
            if plan.is_complete:
                assert self._stage is not None
                result = self._stage.finish(work.sum(self._sum.copy()))  # a sum that fails may have changed its input
                self._begin(plan.stage + 1, result)
            elif not all(each.goes_on for each in standings):
                return False
            else:
                self._do(plan.pieces[work.rank])

    def _standing(self, goes_on: Callable[[], bool] | None, is_worker: bool) -> list[object]:
        pieces = self._stage.pieces if self._stage else 0
        most = 0 if not is_worker else ALL if goes_on is None else 1
        return [self._at, self._result.shape, pieces, self._held, most, goes_on is None or goes_on()]

    def _enter_stage(self) -> None:
        """Make the stage that is due: only now, as the first one may read much data."""
        if self._stage is None and self._at < len(self.stages):
            self._stage = self.stages[self._at](self._result)
            self._forget()

    def _catch_up(self, plan: Round, standings: Sequence[Standing], work: SharedWork) -> None:
        """Bring those that are behind to the stage of the others."""
        is_source = work.rank == plan.source
        result = work.sum(self._result.copy() if is_source else np.zeros(standings[plan.source].shape))
        if work.rank in plan.behind:
            self._begin(plan.stage, result)
            self._enter_stage()

    def _begin(self, stage: int, result: Array) -> None:
        self._at, self._result, self._stage = stage, result, None
        self._sum, self._held = np.zeros(0), []

    def _forget(self) -> None:
        assert self._stage is not None
        self._sum, self._held = np.zeros(self._stage.shape), []

    def _do(self, pieces: Sequence[int]) -> None:
        assert self._stage is not None
        for piece in pieces:
            self._stage.add(piece, self._sum)
            self._held.append(piece)

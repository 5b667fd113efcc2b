"""The division of ranks into replicas of the model, and of a parameter's rows among the ranks of a replica. Pure.

A replica is a set of ranks that hold one copy of the model together: each of them some rows of every parameter, of its
gradient and of its moments. Ranks that hold the same rows in different replicas are a *column*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The ranks of each replica, in order of their places. All replicas have equally many."""

    replicas: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Return the number of ranks that hold one copy of the model together."""
        return len(self.replicas[0])

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this rank's replica."""
        return next(members for members in self.replicas if rank in members)

    def place_of(self, rank: int) -> int:
        """Return the place of a rank in its replica, which says what rows it holds."""
        return self.replica_of(rank).index(rank)

    def column_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same rows as this one, itself among them, in order of replicas."""
        place = self.place_of(rank)
        return tuple(members[place] for members in self.replicas)


def plan_replicas(strategy: str, nodes: Sequence[int], can_divide: bool = True) -> ReplicaPlan:
    """Return the replicas for ranks on these ``nodes``: with ``hsdp`` each node is one, where all nodes have equally
    many ranks; otherwise all ranks together are one. ``can_divide``: whether sums over a part of the ranks exist."""
    everyone = ReplicaPlan((tuple(range(len(nodes))),))
    if strategy != "hsdp" or not can_divide:
        return everyone
    by_node = {node: tuple(rank for rank, other in enumerate(nodes) if other == node) for node in nodes}
    if len({len(ranks) for ranks in by_node.values()}) > 1:
        return everyone  # of the places of a node that lacks a rank, one would be held by nobody
    return ReplicaPlan(tuple(by_node.values()))


def row_range(rows: int, place: int, size: int) -> tuple[int, int]:
    """Return the rows [first, last) of ``rows`` that the rank at this place holds, as `torch.chunk` divides them: the
    last places may have none."""
    each = -(-rows // size)
    return min(rows, place * each), min(rows, (place + 1) * each)


def count_passes(samples: int, micro_batches: int, ranks: int, at_once: int) -> int:
    """Return the passes through the model that every rank makes in a step, at least as many as any has work for: all
    ranks of a replica take part in each other's passes. ``at_once``: the most samples of a pass."""
    largest = -(-samples // micro_batches)
    return -(-micro_batches // ranks) * -(-largest // at_once)

"""Ranks as threads of one process, with real groups of gloo and peer-to-peer connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.comm.group import InterruptibleGroup
from trainer.comm.launcher_env import RankFacts
from trainer.comm.torch_transport import Transport, make_torch_transport
from trainer.comm.world import World


class NoTransport:
    """Moves nothing."""

    linger_seconds = 0.0

    def interrupt(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


CPU = torch.device("cpu")
ALONE = World(RankFacts(), CPU, "gloo")
T = TypeVar("T")


def gloo_openers(ranks: int, timeout: float = 60.0) -> list[Callable[[], Transport]]:
    """What makes the transport of each rank, for an `InterruptibleGroup`."""
    store = dist.HashStore()
    return [
        partial(make_torch_transport, store, rank, ranks, None, timeout, timeout, "127.0.0.1") for rank in range(ranks)
    ]


def worlds_of(openers: Sequence[Callable[[], Transport]], nodes: Sequence[int] = ()) -> list[World]:
    ranks = len(openers)

    def world(rank: int) -> World:
        facts = RankFacts(rank=rank, world_size=ranks, node_rank=nodes[rank] if nodes else 0)
        return World(facts, CPU, "gloo", group=InterruptibleGroup(rank, ranks, openers[rank]))

    return [world(rank) for rank in range(ranks)]


@contextmanager
def thread_worlds(nodes: Sequence[int] = (0, 0)) -> Iterator[list[World]]:
    """The worlds of as many ranks as there are nodes given: each rank's node."""
    worlds = worlds_of(gloo_openers(len(nodes)), nodes)
    try:
        yield worlds
    finally:
        for one in worlds:
            assert one.group is not None
            # One that has failed stays for a minute, and four threads of gloo look for work a hundred times a second.
            if one.group.doing[0] != "nothing":
                one.group.fail("the test is over")
            one.group.close()


def at_once(work: Callable[[T], Any], ranks: Sequence[T]) -> list[Any]:
    """What ``work`` returns on each rank, all at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        going = [pool.submit(work, one) for one in ranks]
        return [one.result(120) for one in going]


def on_two_ranks(work: Callable[[World], Any]) -> list[Any]:
    """What it comes to on each of them; they close their groups in the end, as ranks of a training do."""

    def closing(world: World) -> Any:
        try:
            return work(world)
        finally:
            world.close()

    with thread_worlds() as worlds:
        return at_once(closing, worlds)

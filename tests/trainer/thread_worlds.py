"""Ranks as threads of one process, with real groups of gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainer.comm.group import InterruptibleGroup
from trainer.comm.launcher_env import RankFacts
from trainer.comm.torch_transport import make_torch_transport
from trainer.comm.world import World

CPU = torch.device("cpu")


@contextmanager
def thread_worlds(nodes: Sequence[int] = (0, 0)) -> Iterator[list[World]]:
    """The worlds of as many ranks as there are nodes given: each rank's node."""
    store, ranks = dist.HashStore(), len(nodes)

    def world(rank: int) -> World:
        opener = lambda: make_torch_transport(store, rank, ranks, None, 60.0, 60.0, "127.0.0.1")  # noqa: E731
        facts = RankFacts(rank=rank, world_size=ranks, node_rank=nodes[rank])
        return World(facts, CPU, "gloo", group=InterruptibleGroup(rank, ranks, opener))

    worlds = [world(rank) for rank in range(ranks)]
    try:
        yield worlds
    finally:
        for one in worlds:
            assert one.group is not None
            one.group.fail("the test is over")
            one.group.close()


def at_once(work: Callable[[World], Any], worlds: Sequence[World]) -> list[Any]:
    """What ``work`` returns on each rank, all at once."""
    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(work, worlds))

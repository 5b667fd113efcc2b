"""A world of two ranks in this process, each on a thread of its own, over gloo and peer-to-peer connections."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from trainer.comm.group import InterruptibleGroup
from trainer.comm.launcher_env import RankFacts
from trainer.comm.torch_transport import make_torch_transport
from trainer.comm.world import World


def on_two_ranks(work: Callable[[World], Any]) -> list[Any]:
    """What it comes to on each of them."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        def opened() -> Any:
            return make_torch_transport(store, number, 2, None, 60.0, 60.0, "127.0.0.1")

        facts, group = RankFacts(rank=number, world_size=2), InterruptibleGroup(number, 2, opened)
        world = World(facts, torch.device("cpu"), "gloo", group=group)
        try:
            return work(world)
        finally:
            world.close()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))

"""Torch's default process group, which DeepSpeed wants, among the ranks of a `trainer.comm.world.World`.

The world has a group of its own, which is not torch's default one. This one is made beside it, once in a process.
"""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainer.comm.own_address import interface_of, own_address
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.static_rendezvous import open_listener
from trainer.comm.torch_transport import prove_connections
from trainer.comm.world import World


def form_default_group(world: World, timeout: float) -> None:
    """Make torch's default process group of the ranks of this world, unless there is one of the same ranks already. A
    collective. ``timeout``: the seconds that a collective may wait for a peer.

    Raise `trainer.comm.group.GroupError` or RuntimeError where that fails."""
    os.environ.setdefault("LOCAL_RANK", str(world.facts.local_rank))  # which DeepSpeed reads, whatever the launcher
    rank, size = world.rank, world.world_size
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise RuntimeError(
                f"torch's default process group has rank {dist.get_rank()} of {dist.get_world_size()}, and this "
                f"training is rank {rank} of {size}: call torch.distributed.destroy_process_group() first"
            )
        return
    limit = timedelta(seconds=timeout)
    if size == 1:
        dist.init_process_group(_backend(world), store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        return
    host = own_address(os.environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(host))
    listener = open_listener(host) if rank == 0 else None
    mine: list[Any] = [host, listener.getsockname()[1] if listener else 0, secrets.token_hex(32)]
    host, port, key = world.all_gather_object(mine)[0]
    store = AuthenticatedStore((host, port), rank, size, bytes.fromhex(key), timeout, listener)
    dist.init_process_group(_backend(world), store=store, rank=rank, world_size=size, timeout=limit)
    prove_connections(dist.group.WORLD, rank, size, bytes.fromhex(key), timeout)


def _backend(world: World) -> str:
    return "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"

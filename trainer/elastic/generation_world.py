"""The world of a generation: its group, and the transport that its members use.

Who the members are is decided in `trainer.elastic.generation`, and agreed on in `trainer.elastic.membership`.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from trainer.comm.group import InterruptibleGroup
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import RankFacts
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.tls import client_context, server_context
from trainer.comm.torch_transport import ParameterServerTransport, Transport, make_torch_transport
from trainer.comm.world import World, bind_rank
from trainer.config import DistributedTrainingConfig
from trainer.elastic.generation import Generation


def form_world(
    generation: Generation,
    member: str,
    facts: RankFacts,
    device: torch.device,
    listener: socket.socket,
    config: DistributedTrainingConfig,
    job: str,
    secret: LaunchSecret,
) -> World:
    """Return at once the world of a generation for one of its members; the first collective waits for all.

    ``listener``: the socket at this member's ``store_port``, closed if this member is not rank 0. ``job``: the job's
    id; keys from the ``secret`` are derived for it and the generation.
    """
    rank = generation.rank_of(member)
    assert rank is not None
    size, first = len(generation.members), generation.members[0]
    host = generation.members[rank].host
    here = [other for other, seat in enumerate(generation.members) if seat.host == host]
    cores = bind_rank(here.index(rank), len(here), device, config)
    backend = "nccl" if generation.gpu and config.backend != "gloo" else "gloo"
    group = None
    topology = "star" if config.tls is not None else generation.topology
    if rank or size == 1:
        listener.close()
    if size > 1:
        address = (first.host, first.store_port)
        name, about = f"{job}/g{generation.number}", (job, generation.number)

        def open_transport() -> Transport:
            seconds = config.collective_timeout_seconds
            if topology == "star":
                key = secret.key("star", *about)
                if rank == 0:
                    contexts = server_context(config.tls) if config.tls else None
                    return ParameterServerTransport(ParameterServerGroup.serve(listener, size, key, seconds, contexts))
                contexts = client_context(config.tls) if config.tls else None
                return ParameterServerTransport(
                    ParameterServerGroup.connect_worker(address, rank, size, key, seconds, contexts)
                )
            key = secret.key("store", *about)
            store = AuthenticatedStore(address, rank, size, key, seconds, listener if rank == 0 else None)
            gpu = device if backend == "nccl" else None
            return make_torch_transport(
                dist.PrefixStore(name, store), rank, size, gpu,
                config.collective_timeout_seconds, config.solo_timeout_seconds, generation.members[rank].host,
                key=secret.key("world", *about), close_store=store.close,
            )  # fmt: skip

        group = InterruptibleGroup(rank, size, open_transport, device if device.type == "cuda" else None)
    return World(facts, device, backend, generation.number, group, topology, config.solo_timeout_seconds, cores)

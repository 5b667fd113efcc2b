"""The world of a generation: its group, and the transport that its members use.

Who the members are is decided in `trainer.elastic.generation`, and agreed on in `trainer.elastic.membership`.
"""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from trainer.comm.encryption import (
    describe_open_traffic,
    is_mesh_encrypted,
    refuse_open_traffic,
    refuse_own_connections,
    uses_nccl,
)
from trainer.comm.group import InterruptibleGroup
from trainer.comm.launch_secret import LaunchSecret
from trainer.comm.launcher_env import RankFacts
from trainer.comm.parameter_server import ParameterServerGroup
from trainer.comm.rendezvous_store import AuthenticatedStore
from trainer.comm.socket_group import MeshGroup, connect_mesh
from trainer.comm.tls import TLSContexts
from trainer.comm.torch_transport import Transport, make_torch_transport
from trainer.comm.world import World, explain_shared_gpu
from trainer.config import ConfigError, DistributedTrainingConfig
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
    tls: TLSContexts | None = None,
) -> World:
    """Return at once the world of a generation for one of its members; the first collective waits for all.

    ``listener``: the socket at this member's ``store_port``, closed if this member does not need it. ``job``: the job's
    id; keys from the ``secret`` are derived for it and the generation. ``tls``: what this process's connections are
    encrypted with. Raise `ConfigError` if encryption is required and something would leave a host without it, and if
    two members have the same GPU.
    """
    rank = generation.rank_of(member)
    assert rank is not None
    size, first = len(generation.members), generation.members[0]
    by_nccl = uses_nccl(config, generation.gpu)
    backend = "nccl" if by_nccl else "gloo"
    group = None
    source, hosts = generation.members[rank].certificates, len({seat.host for seat in generation.members})
    open_traffic = describe_open_traffic(source, hosts, by_nccl, config.encryption == "off")
    topology = generation.topology
    is_mesh = topology == "mesh" and is_mesh_encrypted(source, hosts, by_nccl)
    # By their places: a node's new incarnation has the GPU of the one before, which may still be a member.
    gpus = {f"local rank {seat.local_rank} of node {seat.node}": seat.gpu_name for seat in generation.members}
    try:
        if why := explain_shared_gpu(gpus):
            raise ConfigError(why)
        refuse_open_traffic(config, open_traffic)
        if is_mesh and size > 1:
            refuse_own_connections(config)
    except ConfigError:
        listener.close()
        raise
    if size == 1 or (rank and not is_mesh):
        listener.close()
    if size > 1:
        address = (first.host, first.store_port)
        name, about = f"{job}/g{generation.number}", (job, generation.number)

        def open_transport() -> Transport:
            seconds = config.collective_timeout_seconds
            if topology == "star":
                key = secret.key("star", *about)
                if rank == 0:
                    return ParameterServerGroup.serve(listener, size, key, seconds, tls)
                return ParameterServerGroup.connect_worker(address, rank, size, key, seconds, tls)
            if is_mesh:
                places = [(seat.host, seat.store_port) for seat in generation.members]
                channels = connect_mesh(places, rank, listener, secret.key("mesh", *about), seconds, tls)
                return MeshGroup(rank, channels, seconds)
            key = secret.key("store", *about)
            store = AuthenticatedStore(address, rank, size, key, seconds, listener if rank == 0 else None, tls)
            gpu = device if backend == "nccl" else None
            return make_torch_transport(
                dist.PrefixStore(name, store),
                rank,
                size,
                gpu,
                config.collective_timeout_seconds,
                config.solo_timeout_seconds,
                generation.members[rank].host,
                key=secret.key("world", *about),
                close_store=store.close,
            )

        group = InterruptibleGroup(rank, size, open_transport, device if device.type == "cuda" else None)
    return World(facts, device, backend, generation.number, group, topology, config.solo_timeout_seconds, open_traffic)

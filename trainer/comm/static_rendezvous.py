"""Rendezvous of the ranks of a fixed world, as torchrun and similar launchers start it, at MASTER_ADDR.

Work on this address belongs here: joining, and rank 0's listening socket. Members that come and go find each other in
`trainer.elastic.dynamic_rendezvous`.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from trainer.comm.encryption import (
    CertificateSource,
    choose_certificates,
    describe_open_traffic,
    open_contexts,
    refuse_open_traffic,
    refuse_own_connections,
    warn_of_open_traffic,
)
from trainer.comm.group import GroupError, InterruptibleGroup
from trainer.comm.launch_secret import LaunchSecret, read_launch_secret, warn_if_unauthenticated
from trainer.comm.launcher_env import RankFacts, rank_facts
from trainer.comm.listener import BACKLOG
from trainer.comm.own_address import is_loopback, own_address
from trainer.comm.rendezvous_store import AuthenticatedStore, place_said
from trainer.comm.socket_group import MeshGroup, connect_mesh, exchange_places
from trainer.comm.tls import TLSContexts
from trainer.comm.torch_transport import Transport, make_torch_transport
from trainer.comm.world import World, choose_device, explain_shared_gpu, gpu_name
from trainer.config import ConfigError, DistributedTrainingConfig

_JOINED = itertools.count()
"""Numbers the worlds that this process joins under torchrun, of which all ranks join equally many."""


class PeersMissingError(RuntimeError):
    """Some ranks of the world did not connect in time."""


def join_world(config: DistributedTrainingConfig, environment: Mapping[str, str] | None = None) -> World:
    """Return a world of fixed ranks once all have come; block until then or until the timeout.

    Raise `ConfigError` for an environment that cannot be used and for a port that is taken, `PeersMissingError` when
    the timeout is over.
    """
    environment = os.environ if environment is None else environment
    facts = rank_facts(environment, config)
    device, backend = choose_device(facts, config.backend)
    if facts.world_size == 1:
        return World(facts, device, backend)
    if config.tls is not None:
        raise ConfigError(
            "training.tls needs ranks that find each other through the run directory: start the job on a "
            "cluster, which tells its launch in DTRAIN_LAUNCH, not with a fixed MASTER_ADDR"
        )
    secret = read_launch_secret(environment)
    is_one_host = facts.local_world_size == facts.world_size or is_loopback(facts.master_addr)
    host, by_nccl = own_address(environment, facts.master_addr), backend == "nccl"
    source: CertificateSource = "" if is_one_host else choose_certificates(config, secret, host)
    open_traffic = describe_open_traffic(source, 1 if is_one_host else None, by_nccl, config.encryption == "off")
    refuse_open_traffic(config, open_traffic)
    warn_if_unauthenticated(secret, facts.rank)
    warn_of_open_traffic(facts.rank, open_traffic)
    tls = open_contexts(config, secret, host, "static") if source else None
    _stay_on_loopback(facts.master_addr)
    listener = None
    under_torchrun = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent holds the store
    if facts.rank == 0 and not under_torchrun:
        listener = open_listener(facts.master_addr, facts.master_port or 0)
    prefix = "static"
    if under_torchrun:  # the agents' store outlives a world; each agent counts its own restarts, so only then
        prefix = f"{environment.get('TORCHELASTIC_RUN_ID')}/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        if number := next(_JOINED):  # the store still has what the ranks wrote for the world before this one
            prefix += f"/{number}"

    def open_transport() -> Transport:
        assert facts.master_port is not None
        address = facts.master_addr, facts.master_port
        key, seconds = secret.key("store", prefix), config.collective_timeout_seconds
        if under_torchrun:
            store = _beside(address, prefix, facts, environment, secret, seconds, tls)
        else:
            store = AuthenticatedStore(address, facts.rank, facts.world_size, key, seconds, listener, tls)
        if tls is not None and not by_nccl:
            refuse_own_connections(config)
            mesh_store, rank = dist.PrefixStore(f"{prefix}/mesh", store), facts.rank
            try:
                mine, places = exchange_places(mesh_store, rank, facts.world_size, host)
                return MeshGroup(
                    rank, connect_mesh(places, rank, mine, secret.key("mesh", prefix), seconds, tls), seconds
                )
            finally:  # all others have connected to rank 0, which holds the store, and so have read all addresses
                getattr(store, "close", lambda: None)()
        gpu = device if backend == "nccl" else None
        return make_torch_transport(
            dist.PrefixStore(prefix, store),
            facts.rank,
            facts.world_size,
            gpu,
            config.collective_timeout_seconds,
            config.solo_timeout_seconds,
            host,
            key=secret.key("world", prefix),
            close_store=getattr(store, "close", lambda: None),
        )

    world = World(
        facts,
        device,
        backend,
        group=InterruptibleGroup(facts.rank, facts.world_size, open_transport, device if backend == "nccl" else None),
        solo_timeout=config.solo_timeout_seconds,
        open_traffic=open_traffic,
    )
    try:
        gpus = world.all_gather_object(gpu_name(device))
    except GroupError as error:
        world.close()
        if error.mistake is not None:
            raise error.mistake from None
        raise PeersMissingError(
            f"rank {facts.rank} waited {config.collective_timeout_seconds:g} s at MASTER_ADDR={facts.master_addr}, "
            f"MASTER_PORT={facts.master_port} and not all of its {facts.world_size - 1} peers connected: look at "
            "their logs, start all ranks with the same address and port, or raise "
            f"training.collective_timeout_seconds ({error})"
        ) from error
    if why := explain_shared_gpu({f"rank {rank}": gpu for rank, gpu in enumerate(gpus)}) or _explain_mixed(gpus):
        world.close()
        raise ConfigError(why)
    return world


def _explain_mixed(gpus: Sequence[str]) -> str:
    """Return why ranks of which some have a GPU cannot train together; "" where all have one, or none has. Pure."""
    if all(gpus) or not any(gpus):
        return ""
    there, missing = next(rank for rank, gpu in enumerate(gpus) if gpu), gpus.index("")
    return (
        f"rank {there} has a GPU and rank {missing} sees none: give every rank one, or set training.backend = 'gloo' "
        "to train on the CPUs"
    )


def _stay_on_loopback(address: str) -> None:
    """Have gloo listen on loopback only if ``address`` is there: all peers are then on this machine."""
    if is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _beside(
    address: tuple[str, int],
    prefix: str,
    facts: RankFacts,
    environment: Mapping[str, str],
    secret: LaunchSecret,
    seconds: float,
    tls: TLSContexts | None,
) -> dist.Store:
    """Return, under torchrun with a secret, an authenticated store at rank 0: the agent's store trusts anybody.
    The agent's store only gives its address; a false address can make the start fail, but cannot pass the proof."""
    agents = dist.TCPStore(*address, None, False, timedelta(seconds=seconds), wait_for_workers=False)
    if not secret.is_given:
        return agents
    where, listener = f"{prefix}/store", None
    if facts.rank == 0:
        listener = open_listener(own_address(environment, facts.master_addr))
        host, port = listener.getsockname()[:2]
        agents.set(where, f"{port} {host}")
    place = place_said(agents.get(where), address)
    return AuthenticatedStore(place, facts.rank, facts.world_size, secret.key("store", prefix), seconds, listener, tls)


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket for rank 0's store. Raise `ConfigError` if the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _port_taken(port) from error
        raise ConfigError(f"rank 0 cannot listen on MASTER_ADDR={address}, MASTER_PORT={port}: {error}") from error
    listener.listen(BACKLOG)
    return listener


def _port_taken(port: int) -> ConfigError:
    return ConfigError(
        f"MASTER_PORT={port} is in use on this machine by another process: choose another (training.master_port, or "
        "leave it out and a free one is taken)"
    )

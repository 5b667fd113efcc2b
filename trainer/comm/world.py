"""Where this process stands among its peers, and the process group that joins them (F1)."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.comm.group import Group, GroupError
from trainer.comm.launch_secret import LaunchSecret, read, warn_if_open
from trainer.comm.listener import BACKLOG
from trainer.comm.parameter_server import Star
from trainer.comm.rendezvous_store import Store, place_said
from trainer.comm.tls import client_context, server_context
from trainer.comm.torch_transport import StarTransport, TorchTransport, Transport, make_torch_transport
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.elastic.generation import Generation
from trainer.runtime.affinity import AVAILABLE, bind, share_of

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Each launcher's own names, first match wins: torchrun and Azure ML, SLURM, Open MPI.
_NAMES = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # (Open MPI says nothing about the node: its …_NODE_RANK is a rank within one.)
    "node_rank": ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"),
}


class PeersMissingError(RuntimeError):
    """Not all ranks of the world came in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """What the environment says about this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None


def rank_facts(environment: Mapping[str, str], config: DistributedTrainingConfig) -> RankFacts:
    """Read the launcher's variables; without any, this is a world of one. `ConfigError` if they disagree."""
    found: dict[str, int] = {}
    for field, names in _NAMES.items():
        for name in names:
            if name in environment:
                try:
                    found[field] = int(environment[name])
                except ValueError:
                    raise ConfigError(
                        f"{name}={environment[name]!r} in the environment is not a whole number"
                    ) from None
                break
    if ("rank" in found) != ("world_size" in found):
        given, missing = ("RANK", "WORLD_SIZE") if "rank" in found else ("WORLD_SIZE", "RANK")
        raise ConfigError(f"{given} is set and {missing} is not: start with torchrun, or set both or neither")
    rank, world_size = found.get("rank", 0), found.get("world_size", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is outside a world of WORLD_SIZE={world_size} (ranks count from 0)")
    port = _port(environment.get("MASTER_PORT"), config)
    address = environment.get("MASTER_ADDR", config.master_addr)
    if world_size > 1 and port is None:
        raise ConfigError(
            "WORLD_SIZE is above 1 and MASTER_PORT is not set: start with torchrun, or set it on all ranks"
        )
    local_world_size = found.get("local_world_size", 1)
    if not 1 <= local_world_size <= world_size:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local_world_size} does not fit a world of WORLD_SIZE={world_size}: "
            "it is the number of ranks on this node"
        )
    return RankFacts(
        rank=rank,
        world_size=world_size,
        local_rank=found.get("local_rank", rank % local_world_size),
        local_world_size=local_world_size,
        node_rank=found.get("node_rank", rank // local_world_size),
        master_addr=address,
        master_port=port,
    )


def _port(given: str | None, config: DistributedTrainingConfig) -> int | None:
    if given is None:
        return config.master_port
    if not given.isdecimal() or not 1 <= int(given) <= 65535:
        raise ConfigError(f"MASTER_PORT={given!r} in the environment is not a port (1 to 65535)")
    return int(given)


@dataclass(frozen=True, slots=True)
class World:
    """This process, its device and its peers. With one process there is no group, and every collective is a no-op.

    A collective raises `trainer.comm.group.GroupError` where it fails, or where the group has been called off
    meanwhile.
    """

    facts: RankFacts
    device: torch.device
    backend: str
    generation: int = 1
    group: Group | None = None
    topology: str = "mesh"
    """``star``: parameter-server mode, see `trainer.comm.torch_transport.StarTransport`."""
    solo_timeout: float = 1800.0

    @property
    def rank(self) -> int:
        return self.group.rank if self.group else 0

    @property
    def world_size(self) -> int:
        return self.group.size if self.group else 1

    @property
    def node_rank(self) -> int:
        return self.facts.node_rank

    def meet(self) -> None:
        """Wait for all ranks after work that some do alone: as long as ``training.solo_timeout_seconds``, where other
        collectives give up after ``training.collective_timeout_seconds``. A peer that died is noticed at once."""
        if self.group:
            self.group.run("barrier", lambda transport: transport.barrier(self.solo_timeout))

    def sum(self, values: torch.Tensor, what: str = "all-reduce") -> torch.Tensor:
        """Sum over ranks, in place. Integers wrap. ``what`` names it in times and failures."""
        if self.group:
            self.group.sum(what, values).result()
        return values

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag: does any rank raise it? All ranks get the same answer."""
        return tuple(bool(count) for count in self.sum(torch.tensor(flags, dtype=torch.int64)).tolist())

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """The tensor of rank ``source``, on every rank, in place."""
        if self.group:
            self.group.run("broadcast", lambda transport: transport.broadcast(tensor, source))

    def gather(self, value: _T) -> list[_T]:
        """One small value from every rank, in order of rank; it goes as JSON (a tuple comes back as a list)."""
        if not self.group:
            return [value]
        return self.group.run("gather", lambda transport: transport.gather(value))

    def leave(self) -> None:
        """Close the group, if there is one."""
        if self.group:
            self.group.close()


def choose_device(facts: RankFacts, backend: str) -> tuple[torch.device, str]:
    """(device, backend): a GPU of its own for every rank of the node and nccl, else the CPU and gloo.

    `ConfigError` where nccl was asked for and there are too few GPUs.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= facts.local_world_size
    if backend == "nccl" and not enough:
        raise ConfigError(
            f"training.backend = 'nccl' needs a GPU for each of the {facts.local_world_size} ranks of this node, "
            f"which has {gpus}: use backend 'auto' or 'gloo', or fewer processes per node"
        )
    if enough and backend in ("auto", "nccl"):
        device = torch.device("cuda", facts.local_rank)
        torch.cuda.set_device(device)
        return device, "nccl"
    if gpus:
        _log.warning("%d GPUs for %d ranks of this node: training on the CPU", gpus, facts.local_world_size)
    elif os.path.exists("/proc/driver/nvidia/version"):
        _log.warning("there is an NVIDIA driver but no GPU that torch can use: training on the CPU (D4)")
    return torch.device("cpu"), "gloo"


def join(config: DistributedTrainingConfig, environment: Mapping[str, str] | None = None) -> World:
    """A world of fixed ranks, as torchrun and the like start it: blocks until all are there or the timeout is over.

    Raises `ConfigError` for an environment that cannot be used and for a port that is taken, `PeersMissingError` when
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
            "cluster (DTRAIN_LAUNCH in the environment), not with a fixed MASTER_ADDR"
        )
    secret = read(environment)
    warn_if_open(secret, facts.rank, 1 if facts.local_world_size == facts.world_size else None, has_tls=False)
    _stay_on_loopback(facts.master_addr)
    _bind(facts.local_rank, facts.local_world_size, device, config)
    listener = None
    under_torchrun = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # whose agent holds the store
    if facts.rank == 0 and not under_torchrun:
        listener = listen(facts.master_addr, facts.master_port or 0)
    prefix = "static"
    if under_torchrun:  # the agents' store outlives a world; each agent counts its own restarts, so only then
        prefix = f"{environment.get('TORCHELASTIC_RUN_ID')}/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}"

    def open_transport() -> TorchTransport:
        assert facts.master_port is not None
        address = facts.master_addr, facts.master_port
        key, seconds = secret.key("store", prefix), config.collective_timeout_seconds
        if under_torchrun:
            store = _beside(address, prefix, facts, environment, secret, seconds)
        else:
            store = Store(address, facts.rank, facts.world_size, key, seconds, listener)
        gpu = device if backend == "nccl" else None
        return make_torch_transport(
            dist.PrefixStore(prefix, store), facts.rank, facts.world_size, gpu,
            config.collective_timeout_seconds, config.solo_timeout_seconds,
            own_host=None if gpu is not None else _known_host(environment, facts),
            key=secret.key("world", prefix), close_store=getattr(store, "close", lambda: None),
        )  # fmt: skip

    world = World(
        facts, device, backend,
        group=Group(facts.rank, facts.world_size, open_transport, device if backend == "nccl" else None),
        solo_timeout=config.solo_timeout_seconds,
    )  # fmt: skip
    try:
        world.gather(facts.rank)
    except GroupError as error:
        world.leave()
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise PeersMissingError(
            f"rank {facts.rank} waited {config.collective_timeout_seconds:g} s at MASTER_ADDR={facts.master_addr}, "
            f"MASTER_PORT={facts.master_port} and not all of its {facts.world_size - 1} peers came: look into "
            "their logs, start all ranks with the same address and port, or raise "
            f"training.collective_timeout_seconds ({error})"
        ) from error
    return world


def form(
    generation: Generation,
    member: str,
    facts: RankFacts,
    device: torch.device,
    listener: socket.socket,
    config: DistributedTrainingConfig,
    job: str,
    secret: LaunchSecret,
) -> World:
    """The world of a generation, seen by one of its members; returns at once, the first collective waits for all.

    ``listener``: the socket at this member's ``store_port``; closed where rank 0 is somebody else. ``job``: its id,
    which with the generation is what keys from the ``secret`` are for.
    """
    rank = generation.rank_of(member)
    assert rank is not None
    size, first = len(generation.members), generation.members[0]
    host = generation.members[rank].host
    here = [other for other, seat in enumerate(generation.members) if seat.host == host]
    _bind(here.index(rank), len(here), device, config)
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
                    return StarTransport(Star.hub(listener, size, key, seconds, contexts))
                contexts = client_context(config.tls) if config.tls else None
                return StarTransport(Star.spoke(address, rank, size, key, seconds, contexts))
            key = secret.key("store", *about)
            store = Store(address, rank, size, key, seconds, listener if rank == 0 else None)
            gpu = device if backend == "nccl" else None
            return make_torch_transport(
                dist.PrefixStore(name, store), rank, size, gpu,
                config.collective_timeout_seconds, config.solo_timeout_seconds, generation.members[rank].host,
                key=secret.key("world", *about), close_store=store.close,
            )  # fmt: skip

        group = Group(rank, size, open_transport, device if device.type == "cuda" else None)
    return World(facts, device, backend, generation.number, group, topology, config.solo_timeout_seconds)


def _bind(place: int, ranks: int, device: torch.device, config: DistributedTrainingConfig) -> None:
    """This thread, and what it starts, to the cores of the rank at this place among those of its host."""
    if config.bind_cores and device.type == "cpu":
        bind(share_of(place, ranks, torch.get_num_threads(), AVAILABLE))


def own_host(environment: Mapping[str, str], facts: RankFacts) -> str:
    """The address at which peers reach this process: DTRAIN_HOST, else the one that leads to MASTER_ADDR."""
    if "DTRAIN_HOST" in environment:
        return environment["DTRAIN_HOST"]
    if _is_loopback(facts.master_addr):
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in facts.master_addr else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing: only asks the routing table
        try:
            probe.connect((facts.master_addr, 9))
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={facts.master_addr!r} is no address that this host knows: {error}; set "
                "DTRAIN_HOST to this host's own address"
            ) from error
        return probe.getsockname()[0]


def _known_host(environment: Mapping[str, str], facts: RankFacts) -> str | None:
    """The same, None where it cannot be told: gloo may know better."""
    try:
        return own_host(environment, facts)
    except ConfigError:
        return None


def _stay_on_loopback(address: str) -> None:
    """With peers on this machine only, nothing may listen on another interface."""
    if _is_loopback(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _beside(
    address: tuple[str, int], prefix: str, facts: RankFacts, environment: Mapping[str, str], secret: LaunchSecret,
    seconds: float,
) -> dist.Store:  # fmt: skip
    """Under torchrun, whose agent serves a store that believes anybody: with a secret, a store of our own at rank 0.
    The agent's says only where, and who lies about that can make the start fail, but is no store that proves itself."""
    agents = dist.TCPStore(*address, None, False, timedelta(seconds=seconds), wait_for_workers=False)
    if not secret.is_given:
        return agents
    where, listener = f"{prefix}/store", None
    if facts.rank == 0:
        listener = listen(own_host(environment, facts))
        host, port = listener.getsockname()[:2]
        agents.set(where, f"{port} {host}")
    place = place_said(agents.get(where), address)
    return Store(place, facts.rank, facts.world_size, secret.key("store", prefix), seconds, listener)


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket for rank 0's store. `ConfigError` where the port is taken."""
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


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"

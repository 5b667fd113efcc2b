"""Where this process stands among its peers, and the process group that joins them (F1)."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.config import ConfigError, DistributedTrainingConfig

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
    """This process, its device and its peers. With one process there is no group, and every collective is a no-op."""

    facts: RankFacts
    device: torch.device
    backend: str
    generation: int = 1
    patient: dist.ProcessGroup | None = None
    """The same ranks with the longer timeout, for `meet`."""

    @property
    def rank(self) -> int:
        return self.facts.rank

    @property
    def world_size(self) -> int:
        return self.facts.world_size

    @property
    def node_rank(self) -> int:
        return self.facts.node_rank

    def meet(self) -> None:
        """Wait for all ranks after work that some do alone: as long as ``training.solo_timeout_seconds``, where other
        collectives give up after ``training.collective_timeout_seconds``. A peer that died is noticed at once."""
        if self.world_size > 1:
            dist.barrier(group=self.patient)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag: does any rank raise it? All ranks get the same answer."""
        if self.world_size == 1:
            return flags
        tensor = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in tensor.tolist())

    def gather(self, value: _T) -> list[_T]:
        """One small picklable value from every rank, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_rank_0(self, value: _T) -> _T:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


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
    return torch.device("cpu"), "gloo"


def join(config: DistributedTrainingConfig, environment: Mapping[str, str] | None = None) -> World:
    """Choose the device and, with peers, bring up the process group; blocks until all are there or the timeout is over.

    Raises `ConfigError` for an environment that cannot be used and for a port that is taken, `PeersMissingError` when
    the timeout is over.
    """
    environment = os.environ if environment is None else environment
    facts = rank_facts(environment, config)
    device, backend = choose_device(facts, config.backend)
    patient = None
    if facts.world_size > 1:
        timeout = timedelta(seconds=config.collective_timeout_seconds)
        if _is_loopback(facts.master_addr):
            # Peers on this machine only: nothing may listen on another interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                dist.init_process_group(backend, timeout=timeout)  # torchrun's agent already holds the store
            else:
                store = _store(facts, timeout)
                dist.init_process_group(
                    backend, store=store, rank=facts.rank, world_size=facts.world_size, timeout=timeout
                )
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise PeersMissingError(
                f"rank {facts.rank} waited {config.collective_timeout_seconds:g} s at MASTER_ADDR={facts.master_addr}, "
                f"MASTER_PORT={facts.master_port} and not all of its {facts.world_size - 1} peers came: look into "
                "their logs, start all ranks with the same address and port, or raise "
                f"training.collective_timeout_seconds ({error})"
            ) from error
        # gloo beside nccl too: it sees a lost peer by its connection, however long the timeout.
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.solo_timeout_seconds))
    return World(facts, device, backend, patient=patient)


def leave(world: World) -> None:
    """Take the process group down, if there is one."""
    if world.world_size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _store(facts: RankFacts, timeout: timedelta) -> dist.TCPStore:
    """The store through which ranks find each other; rank 0 serves it, on loopback only where its address is that."""
    assert facts.master_port is not None
    options: dict[str, Any] = {}
    if facts.rank == 0 and _is_loopback(facts.master_addr):
        options["master_listen_fd"] = _listen(facts.master_addr, facts.master_port)
    try:
        return dist.TCPStore(
            facts.master_addr, facts.master_port, facts.world_size, facts.rank == 0, timeout,
            wait_for_workers=False, **options,
        )  # fmt: skip
    except (RuntimeError, dist.DistNetworkError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise _port_taken(facts.master_port) from error
        raise


def _listen(address: str, port: int) -> int:
    """A listening socket's descriptor, handed over to torch's store."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _port_taken(port) from error
        raise ConfigError(f"rank 0 cannot listen on MASTER_ADDR={address}, MASTER_PORT={port}: {error}") from error
    listener.listen(128)
    return listener.detach()


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

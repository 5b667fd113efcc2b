"""Read from a launcher's environment variables this process's rank, its node and the address of rank 0.

Only reading and validating them belongs here: no sockets and no torch. How the ranks find
each other from these facts is in `trainer.comm.static_rendezvous` and `trainer.elastic.dynamic_rendezvous`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import ConfigError, DistributedTrainingConfig

# Each launcher's own names, first match wins: torchrun and Azure ML, SLURM, Open MPI.
_NAMES = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # (Open MPI says nothing about the node: its …_NODE_RANK is a rank within one.)
    "node_rank": ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """This process's place in the world, as the environment gives it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None


def rank_facts(environment: Mapping[str, str], config: DistributedTrainingConfig) -> RankFacts:
    """Return the facts in the launcher's variables (none: a world of one). Raise `ConfigError` if they disagree."""
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

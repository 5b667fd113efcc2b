"""Read from a launcher's environment variables this process's rank, its node and the address of rank 0.

Only reading and validating them belongs here: no sockets and no torch. How the ranks find
each other from these facts is in `trainer.comm.static_rendezvous` and `trainer.elastic.dynamic_rendezvous`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import ConfigError, DistributedTrainingConfig

# Each launcher's own names, first match wins: torchrun and Azure ML, Open MPI, SLURM. (mpirun starts its helpers on
# other nodes by srun, whose numbers its ranks inherit.)
_NAMES = {
    "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    "local_rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"),
    # (Open MPI says nothing about the node: its …_NODE_RANK is a rank within one.)
    "node_rank": ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"),
    "nodes": ("GROUP_WORLD_SIZE",),
}
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
"""SLURM's variables with the number of tasks of each node, such as ``2(x3),1``: of this step, and of the job."""
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """This process's place in the world, as the environment gives it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nodes: int | None = None
    """The number of nodes; None: as many as are needed with so many ranks each."""
    has_own_cores: bool = False
    """Whether the launcher has bound this rank to cores of its own."""
    master_addr: str = "127.0.0.1"
    master_port: int | None = None

    @property
    def node_count(self) -> int:
        """The number of nodes."""
        return -(-self.world_size // self.local_world_size) if self.nodes is None else self.nodes


def rank_facts(environment: Mapping[str, str], config: DistributedTrainingConfig) -> RankFacts:
    """Return the facts in the launcher's variables (none: a world of one). Raise `ConfigError` if they disagree."""
    found: dict[str, int] = {}
    is_of_mpi = "RANK" not in environment and "OMPI_COMM_WORLD_RANK" in environment
    is_of_slurm = not is_of_mpi and "RANK" not in environment and "SLURM_PROCID" in environment
    for field, names in _NAMES.items():
        for name in names:
            if name in environment and not (is_of_mpi and name.startswith("SLURM_")):
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
    if is_of_slurm and (tasks := _tasks_of_nodes(environment, world_size)):
        found["nodes"] = len(tasks)
        if found.get("node_rank", 0) < len(tasks):  # also said without --ntasks-per-node, and for nodes that differ
            found["local_world_size"] = tasks[found.get("node_rank", 0)]
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
        nodes=found.get("nodes"),
        has_own_cores=is_of_slurm and environment.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask_cpu", "map_cpu")),
        master_addr=address,
        master_port=port,
    )


def rank_variables(facts: RankFacts) -> dict[str, str]:
    """Return the facts as the variables of torchrun. Pure."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: str(getattr(facts, name.lower())) for name in names}


def _tasks_of_nodes(environment: Mapping[str, str], world_size: int) -> list[int]:
    """Return the number of ranks of each node as SLURM tells it; empty where it does not, or tells of another step."""
    for name in _TASKS_PER_NODE:
        parts = [_TASKS.fullmatch(part) for part in environment.get(name, "").split(",")]
        counts = [(int(part[1]), int(part[2] or 1)) for part in parts if part is not None]
        if len(counts) == len(parts) and sum(tasks * nodes for tasks, nodes in counts) == world_size:
            return [tasks for tasks, nodes in counts for _ in range(nodes)]
    return []


def _port(given: str | None, config: DistributedTrainingConfig) -> int | None:
    if given is None:
        return config.master_port
    if not given.isdecimal() or not 1 <= int(given) <= 65535:
        raise ConfigError(f"MASTER_PORT={given!r} in the environment is not a port (1 to 65535)")
    return int(given)

"""`World`: this process, its device and the peers that it computes with.

The collectives that a training uses and the choice of the device belong here. Finding the peers does not: see
`trainer.comm.static_rendezvous` and `trainer.elastic.dynamic_rendezvous`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer.comm.group import InterruptibleGroup
from trainer.comm.launcher_env import RankFacts
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.runtime.affinity import CoreTurns, take_cores

_log = logging.getLogger(__name__)
_MIG = re.compile(r"\bMIG\b")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that say which GPUs a process sees, of NVIDIA's driver and of AMD's."""
UNKNOWN_GPU = "unknown"
"""The name of a GPU that cannot be told from others."""
_T = TypeVar("_T")


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
    group: InterruptibleGroup | None = None
    topology: str = "mesh"
    """``star``: parameter-server mode, see `trainer.comm.torch_transport.ParameterServerTransport`."""
    solo_timeout: float = 1800.0
    cores: CoreTurns | None = None
    """The turns in which the ranks of this host exchange their cores; None: they do not."""
    open_traffic: str = ""
    """A sentence on what leaves a host unencrypted; "" if nothing does."""

    @property
    def rank(self) -> int:
        """The rank of this process, 0 where it is alone."""
        return self.group.rank if self.group else 0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.group.size if self.group else 1

    @property
    def node_rank(self) -> int:
        """The number of this process's node."""
        return self.facts.node_rank

    def barrier(self) -> None:
        """Wait for all ranks after work that some do alone, up to ``training.solo_timeout_seconds``; other collectives
        fail after ``training.collective_timeout_seconds``. A peer that died is noticed at once."""
        if self.group:
            self.group.run("barrier", lambda transport: transport.barrier(self.solo_timeout))

    def all_reduce(self, values: torch.Tensor, what: str = "all-reduce") -> torch.Tensor:
        """Sum over ranks, in place. Integers wrap. ``what`` names it in times and failures."""
        if self.group:
            self.group.all_reduce(what, values).result()
        return values

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether any rank raises it. All ranks get the same answer."""
        return tuple(bool(count) for count in self.all_reduce(torch.tensor(flags, dtype=torch.int64)).tolist())

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy the tensor of rank ``source`` to every rank, in place."""
        if self.group:
            self.group.run("broadcast", lambda transport: transport.broadcast(tensor, source))

    def all_gather_object(self, value: _T) -> list[_T]:
        """Return one small value from every rank, in order of rank; sent as JSON (a tuple comes back as a list)."""
        if not self.group:
            return [value]
        return self.group.run("gather", lambda transport: transport.all_gather_object(value))

    def close(self) -> None:
        """Close the group, if there is one."""
        if self.group:
            self.group.close()


def choose_device(facts: RankFacts, backend: str) -> tuple[torch.device, str]:
    """Return (device, backend): a GPU for each rank and nccl, else the CPU and gloo. Whether another rank has chosen
    the same GPU is known only where ranks meet, see `explain_shared_gpu`.

    Raise `ConfigError` if nccl was asked for and there is no GPU, or if this rank's is a part of one.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = choose_gpu(gpus, facts, backend)
    if number is not None:
        # CUDA shows a process one MIG instance, however many there are.
        for named in (torch.cuda.get_device_name(number), os.environ.get("CUDA_VISIBLE_DEVICES", "")):
            if why := explain_mig(named, facts.world_size):
                raise ConfigError(why)
        if gpus > facts.local_world_size and facts.local_rank == 0:
            _log.warning(
                "%d of the %d GPUs that this rank sees have no rank and are idle", gpus - facts.local_world_size, gpus
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        return device, "nccl"
    hidden = next((name for name in _VISIBLE if os.environ.get(name) == ""), None)
    if hidden is not None:
        _log.info("this node was given no GPU (%s is empty): training on the CPU", hidden)
    elif not gpus and os.path.exists("/proc/driver/nvidia/version"):
        _log.warning("there is an NVIDIA driver but no GPU that torch can use: training on the CPU")
    return torch.device("cpu"), "gloo"


def choose_gpu(gpus: int, facts: RankFacts, backend: str) -> int | None:
    """Return which of the GPUs that this process sees it computes on; None for the CPU. Pure.

    A launcher shows each rank either all GPUs of its node or only its own, numbered from 0: both lead to one GPU for
    each rank. Raise `ConfigError` if nccl was asked for and no GPU is seen.
    """
    if backend == "nccl" and not gpus:
        raise ConfigError(
            f"training.backend = 'nccl' needs a GPU for each of the {facts.local_world_size} ranks of this node, and "
            "this rank sees none: use backend 'auto' or 'gloo'"
        )
    return None if backend == "gloo" or not gpus else facts.local_rank % gpus


def gpu_name(device: torch.device) -> str:
    """Return what tells a GPU from all others; "" for the CPU, `UNKNOWN_GPU` where the driver does not say."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", UNKNOWN_GPU))


def explain_shared_gpu(gpus: Mapping[str, str]) -> str:
    """Return why ranks with these GPUs cannot train together, and the remedy; "" if they can. ``gpus``: what each rank
    is called → its `gpu_name`. Pure."""
    owners: dict[str, str] = {}
    for rank, gpu in gpus.items():
        if gpu and gpu != UNKNOWN_GPU and (other := owners.setdefault(gpu, rank)) != rank:
            return (
                f"{other} and {rank} use the same GPU ({gpu}), but each rank needs its own: start as many ranks "
                "on a node as it has GPUs (srun --gpus-per-task=1 gives each task one), or set training.backend = "
                "'gloo' to train on the CPUs"
            )
    return ""


def explain_mig(gpu: str, world_size: int) -> str:
    """Return why this GPU, by its name or its place in CUDA_VISIBLE_DEVICES, cannot train among so many ranks; "" if it
    can. Pure."""
    if world_size < 2 or not _MIG.search(gpu):
        return ""
    return (
        f"the GPU of this rank is a MIG instance ({gpu}), and NCCL cannot connect parts of GPUs: switch MIG off "
        "on the nodes (nvidia-smi -mig 0), take a size with whole GPUs, or set training.backend = 'gloo' to train on "
        "the CPUs"
    )


def bind_rank(place: int, ranks: int, device: torch.device, config: DistributedTrainingConfig) -> CoreTurns | None:
    """Bind this thread, and what it starts, to the cores of the rank at this ``place`` among the ``ranks`` of its host,
    where ``training.bind_cores`` asks for it and the rank computes on the CPU. Return their turns, if there are any."""
    if config.bind_cores and device.type == "cpu":
        return take_cores(place, ranks, torch.get_num_threads())
    return None

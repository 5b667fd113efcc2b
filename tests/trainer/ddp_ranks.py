"""Two ranks that compute gradients of small models twice: with torch's DistributedDataParallel, and in our buckets."""

from __future__ import annotations

import copy
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

KINDS = ("plain", "plain", "turned", "conv", "frozen", "double")


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, 2, 2, 1)).flatten(1)


class Parts(nn.Module):
    """Uses its parts, some of them several times or not at all, as each call says."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        made = {"plain": nn.Linear, "frozen": nn.Linear, "double": nn.Linear}
        self.parts = nn.ModuleList(
            made[kind](4, 4) if kind in made else Turned() if kind == "turned" else Convolution() for kind in kinds
        )
        for kind, part in zip(kinds, self.parts, strict=True):
            part.requires_grad_(kind != "frozen").to(torch.float64 if kind == "double" else torch.float32)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.first(x)
        for number in used:
            part = self.parts[number]
            x = part(x.to(next(part.parameters()).dtype)).float().tanh()
        return x


def answer(rank: int, store_path: str, asked: Connection) -> None:
    """Life of a rank: for each ``(seed, kinds, what each rank uses in each micro-batch, bytes of a bucket)`` that is
    asked, the parameters whose gradients differ."""
    from trainer.comm.group import InterruptibleGroup
    from trainer.comm.launcher_env import RankFacts
    from trainer.comm.torch_transport import make_torch_transport
    from trainer.comm.world import World
    from trainer.config import DistributedTrainingConfig
    from trainer.parallel.synchronizer import GradientSynchronizer
    from trainer.runtime.fault_injection import Faults
    from trainer.runtime.step_timer import StepTimer

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group = InterruptibleGroup(rank, 2, lambda: make_torch_transport(store, rank, 2, None, 60.0, 60.0, "127.0.0.1"))
    world = World(RankFacts(rank=rank, world_size=2), cpu, "gloo", group=group)

    def train(mine: list[list[int]], seed: int, net: Parts, ddp: Any, sync: Any) -> None:
        made = torch.Generator().manual_seed(2 * seed + rank)
        for number, used in enumerate(mine):
            x, is_last = torch.randn(3, 4, generator=made), number == len(mine) - 1
            if ddp is None:
                sync.require_sync(is_last)
                net(x, used).square().sum().backward()
                continue
            ddp.require_backward_grad_sync = is_last
            ddp(x, used).square().sum().backward()

    while (question := asked.recv()) is not None:
        seed, kinds, uses, bytes_ = question
        torch.manual_seed(seed)
        net = Parts(kinds)
        other = copy.deepcopy(net)
        ddp = nn.parallel.DistributedDataParallel(other, find_unused_parameters=True)
        train(uses[rank], seed, other, ddp, None)
        with mock.patch.multiple("trainer.parallel.buckets", FIRST_BYTES=bytes_, MOST_BYTES=bytes_):
            sync = GradientSynchronizer(world, Faults({}, 0), StepTimer(False, cpu), DistributedTrainingConfig())
            sync.wrap(net)
        sync.clear(list(net.parameters()))
        train(uses[rank], seed, net, None, sync)
        sync.finish(net)
        sync.drop_unused(world.all_reduce(torch.tensor(sync.missing_flags())).tolist())
        expected = dict(other.named_parameters())
        asked.send([name for name, mine in net.named_parameters() if not _equal(mine.grad, expected[name].grad)])
        sync.unwrap()
    world.close()
    dist.destroy_process_group()


def _equal(found: Tensor | None, expected: Tensor | None) -> bool:
    """``expected`` is the mean over ranks."""
    if found is None or expected is None:
        return found is expected
    return torch.allclose(found, 2 * expected, rtol=1e-5, atol=1e-7) and found.stride() == expected.stride()

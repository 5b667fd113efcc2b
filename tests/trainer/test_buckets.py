"""Gradients of two ranks, summed in buckets while the backward pass goes on, whatever each of them has used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.buckets import Buckets, divide
from trainer.config import DistributedTrainingConfig
from trainer.faults import Faults
from trainer.group import Group, make_torch_transport
from trainer.input import Batch
from trainer.step import Step, Votes
from trainer.world import RankFacts, World

CPU = torch.device("cpu")
ALONE = World(RankFacts(), CPU, "gloo")


class Choosy(nn.Module):
    """Uses a layer by what is in the batch; one it never uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.never = nn.Linear(6, 6), nn.Linear(6, 6)
        self.positive, self.negative = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        last = self.positive if x.flatten()[0] > 0 else self.negative
        return last(self.always(x.flatten(1)))


class Squared(nn.Module):
    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] - target) ** 2


def part(number: int, sign: float) -> tuple[int, Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    windows, target = torch.randn(4, 3, 2, generator=made), torch.randn(4, generator=made)
    windows[0, 0, 0] = sign
    return number, windows, target


def on_two_ranks(work: Callable[[World], Any]) -> list[Any]:
    store = dist.HashStore()

    def rank(number: int) -> Any:
        def opened() -> Any:
            return make_torch_transport(store, number, 2, None, 60.0, 60.0, "127.0.0.1")

        world = World(RankFacts(rank=number, world_size=2), CPU, "gloo", group=Group(number, 2, opened))
        try:
            return work(world)
        finally:
            world.leave()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


@pytest.mark.parametrize("bytes_", [1 << 20, 100])
@pytest.mark.parametrize("signs", [(1, 1, 1, 1), (1, 1, -1, -1), (1, -1, -1, 1), (-1, 1, -1, 1)])
def test_two_ranks_do_what_one_does_whatever_they_use(signs: tuple[float, ...], bytes_: int) -> None:
    """Micro-batches 0 and 2 are rank 0's. What nobody has used is left alone: no weight decay, no moments."""
    parts = [part(number, sign) for number, sign in enumerate(signs)]
    config = DistributedTrainingConfig(weight_decay=0.5, clip_norm=None)

    def trained(net: nn.Module, world: World, mine: tuple[Any, ...]) -> dict[str, Tensor]:
        step = Step(net, Squared(), config, CPU, Faults({}, 0))
        step.adopt(world)
        for number in range(3):
            step(Batch(16, mine, digest=0), number, 0.1, Votes())
        return net.state_dict()

    nets = [Choosy() for _ in range(3)]
    before = copy.deepcopy(nets[0].state_dict())
    expected = trained(nets[2], ALONE, tuple(parts))
    with mock.patch.multiple("trainer.buckets", FIRST_BYTES=bytes_, MOST_BYTES=bytes_):
        found = on_two_ranks(lambda world: trained(nets[world.rank], world, tuple(parts[world.rank :: 2])))
    for name, value in expected.items():
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], value, msg=name)
        is_used = not name.startswith("never") and not (name.startswith("negative") and min(signs) > 0)
        assert torch.equal(value, before[name]) == (not is_used)


def test_a_bucket_is_handed_over_before_the_backward_pass_is_over() -> None:
    class Over:
        def result(self) -> None:
            order.append("waited")

    order: list[str] = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net[0].weight.register_hook(lambda _: order.append("first layer"))  # type: ignore[union-attr]
    parameters = list(net.parameters())
    with mock.patch.multiple("trainer.buckets", FIRST_BYTES=288, MOST_BYTES=288):
        assert [len(group) for group in divide(parameters[::-1])] == [2, 2]

        def hand_over(bucket: Any) -> Any:
            order.append(f"bucket {bucket.index()}{' is the last' if bucket.is_last() else ''}")
            return Over()

        buckets = Buckets(parameters, hand_over, 2)
    buckets.clear()
    buckets.summing = False
    net(torch.ones(1, 8)).sum().backward()
    assert order == ["first layer"]
    buckets.summing = True
    net(torch.ones(1, 8)).sum().backward()
    assert order[1:] == ["bucket 0", "first layer", "bucket 1 is the last", "waited", "waited"]
    for bucket in buckets.buckets:
        assert all(one.grad is view for one, view in zip(bucket.parameters, bucket.views, strict=True))
    buckets.detach()
    net(torch.ones(1, 8)).sum().backward()
    assert order.count("waited") == 2

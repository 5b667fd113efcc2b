"""A module that is given to torch's FSDP2, taken out of it and given to it again, which torch has no function for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.model.blocks import find_blocks
from trainer.parallel.replicas import ReplicaPlan
from trainer.parallel.shard_collectives import ShardCollectives
from trainer.parallel.sharding import ShardedModel
from trainer.runtime.step_timer import StepTimer

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Blocks, and a weight that two parts of the rest share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def looks(module: nn.Module) -> Any:
    """The class of each part, its attributes and how many entries they have."""
    return [
        (name, type(part), sorted(vars(part)), [len(value) for value in vars(part).values() if isinstance(value, dict)])
        for name, part in module.named_modules()
    ]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    module(torch.ones(2, 6)).square().sum().backward()
    return {name: item.grad.clone() for name, item in module.named_parameters() if item.grad is not None}


def divided(module: nn.Module) -> ShardedModel:
    model = ShardedModel(module, find_blocks(module), DistributedTrainingConfig(strategy="fsdp"), CPU)
    assert len(model.blocks) == 3
    hold(model)
    return model


def assert_gradients(model: ShardedModel, expected: dict[str, Tensor]) -> None:
    model.collect_gradients()
    torch.testing.assert_close({name: item.grad for name, item in model.held.items()}, expected)


def hold(model: ShardedModel) -> None:
    """Hold all rows, as the only rank."""
    model.shard(0, 1, {name: rows.clone() for name, rows in model.rows.items()})
    world, plan = World(RankFacts(), CPU, "gloo"), ReplicaPlan(((0,),))
    ShardCollectives(world, plan, StepTimer(False, CPU)).connect(model.module)


def test_a_module_can_be_divided_again_and_is_left_as_it_was() -> None:
    """FSDP2 keeps the modules that it has, by a private name of torch, and refuses to take one twice."""
    expected, module = gradients(Tied()), Tied()
    before, own = looks(module), {name: id(item) for name, item in module.named_parameters()}
    values = {name: item.detach().clone() for name, item in module.named_parameters()}
    model = divided(module)
    for _ in range(2):
        assert isinstance(module, FSDPModule)
        module(torch.ones(2, 6)).square().sum().backward()
        assert_gradients(model, expected)
        hold(model)
    model.make_whole(values)
    assert looks(module) == before
    assert {name: id(item) for name, item in module.named_parameters()} == own
    torch.testing.assert_close(gradients(module), expected)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_pass_that_fails_leaves_nothing_behind(at: str) -> None:
    expected, module = gradients(Tied()), Tied()
    model = divided(module)
    model.reset()  # nothing has been passed yet

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    block: Any = module.blocks[1]
    handle = (block[0].register_forward_hook if at == "forward" else block[0].register_full_backward_hook)(fail)
    with pytest.raises(RuntimeError, match="planted"):
        module(torch.ones(2, 6)).square().sum().backward()
    handle.remove()
    model.reset()
    assert all(item.grad is None for item in module.parameters())
    module(torch.ones(2, 6)).square().sum().backward()
    assert_gradients(model, expected)

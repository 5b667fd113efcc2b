"""Weights and moments in one piece of memory: what comes out is what torch's AdamW gives, however it is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from two_ranks import on_two_ranks

from trainer.comm.group import CompletedCollective
from trainer.comm.world import World
from trainer.parallel.buckets import Buckets
from trainer.parallel.flat_adamw import FlatAdamW
from trainer.parallel.synchronizer import GradientSynchronizer
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

RATE, DECAY = 1e-2, 0.1


class Odd(nn.Module):
    """Weights that lie in memory in ways of their own, one that is frozen, and one that is used where it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.extra = nn.Linear(6, 6)

    def forward(self, x: Tensor, with_extra: bool) -> Tensor:
        y = self.conv(x).flatten(1).mean() + ((self.turned * self.scalar) @ self.frozen).sum()
        return y + self.extra(self.frozen).sum() if with_extra else y


class Heads(nn.Module):
    """Two parts, each used where it is told. Large enough for rounding to show which way an update took."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(50, 37) for _ in range(2))

    def forward(self, x: Tensor, used: tuple[int, int]) -> Tensor:
        outputs = [head(x.flatten(1)).tanh().sum() for head, is_used in zip(self.heads, used, strict=True) if is_used]
        return torch.stack(outputs).sum()


class Pair:
    """The same model twice: with torch's optimizer, and with ours."""

    def __init__(self, make: Callable[[], nn.Module] = Odd) -> None:
        self.theirs = make()
        self.ours = copy.deepcopy(self.theirs)
        self.adamw = torch.optim.AdamW(self.theirs.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
        self.flat = FlatAdamW(self.ours, RATE, DECAY)
        self.make_buckets()

    def make_buckets(self) -> None:
        self.buckets = Buckets(
            [item for item in self.ours.parameters() if item.requires_grad], lambda _: CompletedCollective()
        )

    def step(self, number: int, used: Any = True) -> None:
        x = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(number))
        for optimizer in (self.adamw, self.flat):
            optimizer.param_groups[0]["lr"] = RATE / (1 + number)
        self.adamw.zero_grad()
        (self.theirs(x, used) ** 2).backward()
        self.adamw.step()
        self.buckets.clear()
        self.buckets.begin()
        (self.ours(x, used) ** 2).backward()
        self.buckets.finish()
        without = self.buckets.missing_flags()
        self.buckets.drop_unused(without, 1)
        self.flat.update(None if any(without) else self.buckets.buckets[0].buffer())

    def check(self) -> None:
        torch.testing.assert_close(self.ours.state_dict(), self.theirs.state_dict())
        theirs, ours = self.adamw.state_dict(), self.flat.state_dict()
        torch.testing.assert_close(ours["state"], theirs["state"])
        assert ours["param_groups"] == theirs["param_groups"]


def operations(work: Callable[[], Any]) -> list[str]:
    found = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(str(function.overloadpacket))
            return function(*args, **(kwargs or {}))

    with Noting():
        work()
    return found


def test_an_update_is_that_of_torch_in_two_operations() -> None:
    pair = Pair()
    assert pair.flat.is_flat
    for number in range(5):
        pair.step(number)
        pair.check()
    gradient = pair.buckets.buckets[0].buffer()
    made = operations(lambda: pair.flat.update(gradient))
    assert [name for name in made if name.endswith("_")] == ["aten.add_", "aten._fused_adamw_"]


def test_strides_stay_as_they_were() -> None:
    pair = Pair()
    for (name, ours), theirs in zip(pair.ours.named_parameters(), pair.theirs.parameters(), strict=True):
        assert ours.stride() == theirs.stride(), name


@pytest.mark.parametrize("used", [(1, 1, 0, 1, 1), (0, 0, 1, 1), (0, 0, 0), (1, 0, 1, 0)])
def test_what_has_no_gradient_is_left_alone_and_counts_for_itself(used: tuple[int, ...]) -> None:
    pair = Pair()
    for number, with_extra in enumerate(used):
        pair.step(number, bool(with_extra))
        pair.check()


def test_which_way_an_update_takes_follows_from_what_is_saved() -> None:
    """Counts that were apart and meet again: who has just loaded goes the same way, to the last bit."""
    pair = Pair(Heads)
    for number, heads in enumerate(((1, 1), (1, 0), (1, 1), (0, 1), (1, 1))):
        pair.step(number, heads)
    other = Pair(Heads)
    other.ours.load_state_dict(pair.ours.state_dict())
    other.flat.load_state_dict(copy.deepcopy(pair.flat.state_dict()))
    for number in range(5, 20):
        made = [operations(lambda one=one, number=number: one.step(number, (1, 1))) for one in (pair, other)]
        assert made[0].count("aten._fused_adamw_") == made[1].count("aten._fused_adamw_") == 2  # and that of torch
    torch.testing.assert_close(other.ours.state_dict(), pair.ours.state_dict(), rtol=0, atol=0)


def test_a_parameter_that_was_frozen_is_in_no_later_bucket_and_stays() -> None:
    pair = Pair()
    pair.step(0)
    for model in (pair.ours, pair.theirs):
        model.scalar.requires_grad_(False)
    pair.buckets.detach()
    pair.make_buckets()
    for number in range(1, 4):
        pair.step(number)
        pair.check()


@pytest.mark.parametrize("used", [(1, 1), (1, 0)])
def test_what_is_saved_is_what_torch_saves_and_loads_in_either(used: tuple[int, ...]) -> None:
    pair = Pair()
    for number, with_extra in enumerate(used):
        pair.step(number, bool(with_extra))
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (pair.adamw, pair.flat)]
    for state in saved:  # as a checkpoint has it: without the strides of the parameters
        for of_one in state["state"].values():
            of_one.update({name: value.contiguous() for name, value in of_one.items()})
    pair.step(7)  # what is to be forgotten
    weights = copy.deepcopy(pair.theirs.state_dict())
    for model in (pair.ours, pair.theirs):
        model.load_state_dict(weights)
    pair.adamw.load_state_dict(saved[1])
    for parameter, of_one in pair.adamw.state.items():  # which torch leaves as they come, and then mixes up
        for name in ("exp_avg", "exp_avg_sq"):
            of_one[name] = torch.empty_like(parameter).copy_(of_one[name])
    pair.flat.load_state_dict(saved[0])
    for number in range(2, 5):
        pair.step(number)
        pair.check()


def test_a_state_that_was_loaded_is_nobody_elses() -> None:
    pair = Pair()
    pair.step(0)
    saved = pair.flat.state_dict()
    before = copy.deepcopy(saved)
    other = Pair()
    other.flat.load_state_dict(saved)
    other.step(1)
    torch.testing.assert_close(saved["state"], before["state"], rtol=0, atol=0)


def test_a_model_that_gives_a_weight_other_memory_trains_on() -> None:
    pair = Pair()
    pair.step(0)
    for weight in (pair.ours.scalar, pair.ours.conv.weight):  # the second one row by row, too
        weight.data = weight.detach().clone(memory_format=torch.contiguous_format)
    for number in range(1, 4):
        pair.step(number)
        pair.check()


class Tied(nn.Module):
    """Two parameters in the same memory, which torch takes for two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.other.data = self.one.data


class Shadowed(nn.Module):
    """A buffer that shows what a parameter is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("shown", self.weight.detach())


class Viewed(nn.Module):
    """Uses a weight by another name, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.turned = self.weight.t()


@pytest.mark.parametrize(
    "make",
    [
        Tied,
        Shadowed,
        Viewed,
        lambda: nn.Linear(1 << 10, 1 << 9, bias=False),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
    ],
    ids=["tied", "shadowed", "viewed", "large", "two types"],
)
def test_weights_that_cannot_move_stay(make: Callable[[], nn.Module]) -> None:
    model = make()
    places = [item.data_ptr() for item in model.parameters()]
    optimizer = FlatAdamW(model, RATE, DECAY)
    assert not optimizer.is_flat
    assert [item.data_ptr() for item in model.parameters()] == places
    before = [item.detach().clone() for item in model.parameters()]
    for item in model.parameters():
        item.grad = torch.ones_like(item)
    optimizer.update(None)
    assert not any(torch.equal(item, value) for item, value in zip(model.parameters(), before, strict=True))


def test_a_buffer_without_memory_of_its_own_kind_hinders_nothing() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    assert FlatAdamW(model, RATE, DECAY).is_flat


def test_ranks_of_which_one_is_not_flat_all_update_each_parameter() -> None:
    def trained(world: World) -> Tensor | None:
        sync = GradientSynchronizer(world, Faults({}, 0), StepTimer(False, torch.device("cpu")))
        model = nn.Linear(2, 2)
        sync.wrap(model, flat=world.rank == 0 or both)
        sync.clear(list(model.parameters()))
        sync.require_sync(True)
        model(torch.ones(1, 2)).sum().backward()
        sync.finish(model)
        sync.drop_unused(sync.missing_flags())
        return sync.single_flat_gradient()

    for both in (False, True):
        assert [found is not None for found in on_two_ranks(trained)] == 2 * [both]


def test_a_loop_of_the_callers_own_keeps_its_weights_where_they_are() -> None:
    model = nn.Linear(2, 2)
    places = [item.data_ptr() for item in model.parameters()]
    assert not FlatAdamW(model, RATE, DECAY, together=False).is_flat
    assert [item.data_ptr() for item in model.parameters()] == places
    FlatAdamW(nn.LazyLinear(2), RATE, DECAY, together=False)  # which has no memory yet

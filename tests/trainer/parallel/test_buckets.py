"""Gradients of two ranks, summed in buckets while the backward pass goes on, whatever each of them has used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
from ddp_ranks import KINDS, answer
from hypothesis import given
from hypothesis import strategies as st
from steps import Squared, step_of
from thread_worlds import ALONE, CPU, on_two_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.worlds import FORKS
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch, Samples
from trainer.engine.loop_step import LoopParts, LoopStep
from trainer.engine.steps import StepFlags
from trainer.model.optimizers import USUAL
from trainer.model.task import SupervisedTask
from trainer.parallel.buckets import PIECE, Buckets, divide, gradient_norm
from trainer.parallel.synchronizer import GradientSynchronizer
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer


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


def part(number: int, sign: float) -> Samples:
    made = torch.Generator().manual_seed(number)
    windows, target = torch.randn(4, 3, 2, generator=made), torch.randn(4, generator=made)
    windows[0, 0, 0] = sign
    return Samples(number, 4, (windows, target))


class Reentrant(nn.Module):
    """Two parts inside which a backward pass of their own begins; ``tied``: with the same parameters."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = self.body if tied else nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.body, self.first(x.flatten(1)).tanh(), use_reentrant=True)
        return checkpoint(self.head, x.tanh(), use_reentrant=True)


def train_alone_and_on_two(
    kind: Callable[[], nn.Module], signs: Sequence[float], bytes_: int, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a model before and after three steps: those of one rank, which two come to as well. Micro-batches
    0 and 2 are rank 0's."""
    parts = [part(number, sign) for number, sign in enumerate(signs)]

    def trained(net: nn.Module, world: World, mine: list[Any]) -> dict[str, Tensor]:
        step = step_of(net, world, **settings)
        for number in range(3):
            step(Batch(16, tuple(mine), digest=0), number, 0.1, StepFlags())
        return net.state_dict()

    nets = [kind() for _ in range(3)]
    before = copy.deepcopy(nets[2].state_dict())
    expected = trained(nets[2], ALONE, parts)
    with mock.patch.multiple("trainer.parallel.buckets", FIRST_BYTES=bytes_, MOST_BYTES=bytes_):
        found = on_two_ranks(lambda world: trained(nets[world.rank], world, parts[world.rank :: 2]))
    for name, value in expected.items():
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], value, msg=name)
    return before, expected


@pytest.mark.parametrize("bytes_", [1 << 20, 100])
@pytest.mark.parametrize("signs", [(1, 1, 1, 1), (1, 1, -1, -1), (1, -1, -1, 1), (-1, 1, -1, 1)])
def test_two_ranks_do_what_one_does_whatever_they_use(signs: tuple[float, ...], bytes_: int) -> None:
    """What nobody has used is left alone: no weight decay, no moments."""
    before, after = train_alone_and_on_two(Choosy, signs, bytes_, weight_decay=0.5, clip_norm=None)
    for name, value in after.items():
        is_used = not name.startswith("never") and not (name.startswith("negative") and min(signs) > 0)
        assert torch.equal(value, before[name]) == (not is_used)


@pytest.mark.parametrize(
    ("kind", "bytes_"), [(Reentrant, 1 << 20), (Reentrant, 100), (partial(Reentrant, tied=True), 1 << 20)]
)
def test_two_ranks_do_what_one_does_whatever_the_model_is(kind: Callable[[], nn.Module], bytes_: int) -> None:
    train_alone_and_on_two(kind, (1, 1, 1, 1), bytes_)


def test_a_parameter_in_two_reentrant_parts_is_refused_not_summed_too_early() -> None:
    """Unless there is only one bucket, which is not summed before all of them are over."""
    nets = [Reentrant(tied=True) for _ in range(2)]

    def work(world: World) -> None:
        step = step_of(nets[world.rank], world)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            step(Batch(8, (part(world.rank, 1),), digest=0), 0, 0.1, StepFlags())

    with mock.patch.multiple("trainer.parallel.buckets", FIRST_BYTES=100, MOST_BYTES=100):
        on_two_ranks(work)


@pytest.mark.parametrize("communication", ["fp16", "topk"])
def test_ranks_stay_equal_where_what_they_use_changes_and_small_values_are_dropped(communication: Any) -> None:
    nets = [Choosy() for _ in range(2)]
    before = copy.deepcopy(nets[0].state_dict())

    def work(world: World) -> dict[str, Tensor]:
        step = step_of(nets[world.rank], world, communication=communication, topk_fraction=0.03, weight_decay=0.5)
        for number in range(12):
            sign = 1 if (world.rank + number) % 2 else -1
            step(Batch(8, (part(2 * number + world.rank, sign),), digest=0), number, 0.1, StepFlags())
        return nets[world.rank].state_dict()

    one, other = on_two_ranks(work)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert torch.equal(value, before[name]) == name.startswith("never")


@pytest.mark.parametrize("several", [False, True])
def test_a_loop_of_the_callers_own_gets_sums_over_ranks(several: bool) -> None:
    """Over two passes, of a step that is discarded once; what no rank has used stays as it was."""

    def train(net: Choosy, world: World, ranks: tuple[int, ...]) -> dict[str, Tensor]:
        parts = LoopParts(
            optimizers=[torch.optim.AdamW(net.parameters(), weight_decay=0.5)], schedulers=[None], steps_several=several
        )
        config = DistributedTrainingConfig(world_size=2, gradient_accumulation_steps=2, batch_size_per_gpu=4)
        step = LoopStep(net, SupervisedTask(Squared()), config, CPU, Faults({}, 0), USUAL, 0, parts=parts)
        step.adopt(world)
        for number in range(4):
            signs = {rank: 1 if rank or number % 2 else -1 for rank in ranks}
            micro = [part(100 * number + 10 * at + rank, signs[rank]) for rank in ranks for at in (0, 1)]
            for again in range(2 if number == 1 else 1):
                step.begin(Batch(16, tuple(micro), digest=0), number, StepFlags())
                for windows, target in step.micro_batches():
                    step.backward(Squared()(net(windows), target))
                if number == 1 and not again:
                    if several:
                        step.take_optimizer_step(step.optimizers[0])
                    step.discard(ArithmeticError("of the caller's own"))
                    step.note_versions()
                    continue
                step.take_optimizer_step(step.optimizers[0])
                step.complete()
                step.note_versions()
        return net.state_dict()

    nets = [Choosy() for _ in range(3)]
    before = copy.deepcopy(nets[0].never.weight)
    expected = train(nets[2], ALONE, (0, 1))
    with mock.patch.multiple("trainer.parallel.buckets", FIRST_BYTES=100, MOST_BYTES=100):
        for found in on_two_ranks(lambda world: train(nets[world.rank], world, (world.rank,))):
            assert torch.equal(found["never.weight"], before)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_parameters_that_are_unfrozen_later_or_lie_elsewhere_are_refused() -> None:
    net = Choosy().requires_grad_(False)
    net.always.requires_grad_(True)
    step = step_of(net)
    step.check_parameters()
    net.positive.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"positive.weight was frozen .*detach"):
        step.check_parameters()
    with pytest.raises(ConfigError, match="parameters on cpu and meta"):
        divide([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))])


def test_cuda_graphs_find_gradients_in_memory_that_stays() -> None:
    """Without a GPU: the place of each gradient is the bucket's, and what is unused has none."""
    net = Choosy()
    config = DistributedTrainingConfig(compile="reduce-overhead")
    sync = GradientSynchronizer(ALONE, Faults({}, 0), StepTimer(False, CPU), config)
    sync.wrap(net)
    for _ in range(2):
        sync.clear(list(net.parameters()))
        assert net.always.weight.grad is not None
        place = net.always.weight.grad.data_ptr()
        sync.require_sync(True)
        net(part(0, 1).data[0]).sum().backward()
        sync.finish(net)
        assert net.always.weight.grad.data_ptr() == place
        assert net.always.weight.grad.count_nonzero()
        assert net.negative.weight.grad is None
        assert net.never.weight.grad is None


@pytest.fixture(scope="module")
def ddp_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    store = str(tmp_path_factory.mktemp("ddp") / "store")
    ours, theirs = zip(*(FORKS.Pipe() for _ in range(2)), strict=True)
    ranks = [FORKS.Process(target=answer, args=(rank, store, theirs[rank])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    yield list(ours)
    for rank, pipe in zip(ranks, ours, strict=True):
        if rank.is_alive():
            pipe.send(None)
        rank.join(10)
        rank.kill()


@given(data=st.data(), seed=st.integers(0, 1000), bytes_=st.sampled_from([1, 100, 1 << 20]))
def test_gradients_are_those_of_distributed_data_parallel(
    ddp_ranks: list[Connection], data: st.DataObject, seed: int, bytes_: int
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    used = st.lists(st.integers(0, len(kinds) - 1), max_size=4)
    uses = data.draw(st.lists(st.lists(used, min_size=1, max_size=3), min_size=2, max_size=2))
    for pipe in ddp_ranks:
        pipe.send((seed, kinds, uses, bytes_))
    for pipe in ddp_ranks:
        assert pipe.poll(60), "a rank is gone"
        assert pipe.recv() == []


def test_a_bucket_is_handed_over_before_the_backward_pass_is_over() -> None:
    class Over:
        def result(self) -> None:
            order.append("waited")

    order: list[str] = []
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net[0].weight.register_hook(lambda _: order.append("first layer"))  # type: ignore[union-attr]
    parameters = list(net.parameters())
    with mock.patch.multiple("trainer.parallel.buckets", FIRST_BYTES=288, MOST_BYTES=288):
        assert [len(group) for group in divide(parameters[::-1])] == [2, 2]

        def hand_over(bucket: Any) -> Any:
            order.append(f"bucket {bucket.number}{' is the last' if bucket.is_last else ''}")
            return Over()

        buckets = Buckets(parameters, hand_over)
    buckets.clear()
    buckets.begin(summing=False)
    net(torch.ones(1, 8)).sum().backward()
    assert order == ["first layer"]
    buckets.begin()
    net(torch.ones(1, 8)).sum().backward()
    assert order[1:] == ["bucket 0", "first layer", "bucket 1 is the last"]
    buckets.finish()
    assert order[1:] == ["bucket 0", "first layer", "bucket 1 is the last", "waited", "waited"]
    for bucket in buckets.buckets:
        assert all(one.grad is view for one, view in zip(bucket.parameters, bucket.views, strict=True))
    buckets.detach()
    net(torch.ones(1, 8)).sum().backward()
    assert order.count("waited") == 2


@pytest.mark.parametrize("sizes", [(3,), (PIECE, 5), (2 * PIECE + 1, 7), (6_500_000,)])
def test_the_norm_for_clipping_is_right_to_rounding_however_large_the_gradient_is(sizes: tuple[int, ...]) -> None:
    chance = torch.Generator().manual_seed(0)
    gradients = [1e-3 * torch.randn(size, generator=chance) for size in sizes]
    expected = torch.cat(gradients).double().norm()
    assert gradient_norm(gradients, CPU).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_norm_is_of_tensors_of_any_shape_and_none_at_all() -> None:
    across = torch.ones(PIECE, 2).t()  # not contiguous
    assert gradient_norm([across], CPU).item() == pytest.approx((2 * PIECE) ** 0.5)
    assert gradient_norm([across[:, :4], torch.ones(())], CPU).item() == pytest.approx(3.0)
    assert gradient_norm([], CPU).item() == 0.0
    assert gradient_norm([torch.tensor([1.0, torch.inf])], CPU).isinf()

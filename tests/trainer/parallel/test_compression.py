"""Sums of gradients with fewer bytes: through real groups of gloo, in many buckets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from steps import step_of
from thread_worlds import at_once, thread_worlds
from torch import Tensor, nn

from harness.elastic_nodes import KILLED, Nodes
from trainer.comm.group import GroupError
from trainer.comm.torch_transport import TorchTransport
from trainer.comm.world import World
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.data.batches import Batch, Samples
from trainer.data.coverage import find_coverage_errors
from trainer.engine.steps import NonFiniteError, StepFlags
from trainer.parallel.compression import FP16Compression, TopKCompression, largest, make_comm_hook
from trainer.parallel.synchronizer import CommHook

NODES = (0, 0, 1, 1)
"""Two ranks on each of two nodes."""
SIZES = (40, 300, 100, 200, 300, 100, 200, 300, 40, 300)
"""Of layers: with buckets of a few hundred bytes, about a dozen of them."""


class LoopbackTransport:
    """Returns this rank's own data at once, as if every rank had sent it: a hook then only computes."""

    def all_reduce(self, tensor: Tensor) -> None: ...

    def all_to_all(self, output: Tensor, input_: Tensor) -> None:
        output.copy_(input_)

    all_gather = all_to_all

    def hierarchical_all_reduce(self, tensor: Tensor, nodes: Sequence[int]) -> None: ...


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for size in SIZES for layer in (nn.Linear(8, size), nn.Tanh(), nn.Linear(size, 8))]
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), *layers, nn.Linear(8, 1))


def batch(rank: int, ranks: int, step: int, poison: float | None = None) -> Batch:
    made = torch.Generator().manual_seed(1000 * step + rank)
    windows, target = torch.randn(8, 3, 2, generator=made), torch.randn(8, generator=made)
    if poison is not None and rank == 1:
        windows[0, 0, 0] = poison
    return Batch(8 * ranks, (Samples(rank, 8, (windows, target)),), digest=rank)


@pytest.fixture
def worlds() -> Iterator[Callable[[int], list[World]]]:
    with ExitStack() as made, mock.patch.multiple("trainer.parallel.buckets", FIRST_BYTES=4000, MOST_BYTES=10_000):
        yield lambda ranks: made.enter_context(thread_worlds(NODES[:ranks]))


def train(worlds: list[World], steps: int = 3, **settings: Any) -> tuple[list[Tensor], list[int]]:
    """The gradients of the last step, the same on each rank; and the bytes of each bucket as reported."""
    networks = [network() for _ in worlds]  # one after the other, for there is one random state only

    def work(world: World) -> Any:
        step = step_of(networks[world.rank], world, clip_norm=None, **settings)
        for number in range(steps):
            step(batch(world.rank, len(worlds), number), number, 0.0, StepFlags())
        assert world.group is not None
        counted = [item.bytes for item in world.group.collectives if "gradient bucket" in item.what]
        return [parameter.grad for parameter in step.parameters], counted[-(len(counted) // steps) :]

    [(one, counted), *others] = at_once(work, worlds)
    for grads, _ in others:
        assert all(torch.equal(a, b) for a, b in zip(one, grads, strict=True)), "ranks must not drift apart"
    return one, counted


def off(grads: list[Tensor], exact: list[Tensor]) -> float:
    """The error's norm over that of the gradient."""
    [mine, theirs] = [torch.cat([grad.flatten() for grad in each]) for each in (grads, exact)]
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.slow
def test_each_way_of_summing_comes_to_the_same_on_all_ranks_with_many_buckets(
    worlds: Callable[[int], list[World]],
) -> None:
    plain, sent = train(worlds(4))
    assert len(sent) >= 8, "many buckets"
    half, half_sent = train(worlds(4), communication="fp16")
    assert 0 < off(half, plain) < 1e-3
    assert sum(half_sent) == pytest.approx(sum(sent) / 2, rel=0.02)
    by_node, node_sent = train(worlds(4), communication="hierarchical")
    assert off(by_node, plain) < 1e-6
    assert sum(node_sent) == pytest.approx(sum(sent) * (1 / 2) / (3 / 4), rel=0.01), "two nodes instead of four ranks"
    whole, _ = train(worlds(4), communication="topk", topk_fraction=1.0)
    assert off(whole, plain) < 1e-6
    some, some_sent = train(worlds(3), communication="topk", topk_fraction=0.05)
    assert sum(some_sent) == pytest.approx(3 * 0.05 * sum(sent), rel=0.05)
    assert 0 < sum(int(grad.count_nonzero()) for grad in some) <= 0.16 * sum(sent) / 4


@pytest.mark.parametrize("communication", ["fp16", "topk"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_numbers_that_are_not_finite_end_the_step_on_all_ranks(
    worlds: Callable[[int], list[World]], communication: Any, poison: float
) -> None:
    def work(world: World) -> str:
        step = step_of(network(), world, communication=communication, clip_norm=None)
        with pytest.raises(NonFiniteError) as failed:
            step(batch(world.rank, 2, 0, poison), 0, 1e-3, StepFlags())
        return str(failed.value)

    [one, other] = at_once(work, worlds(2))
    assert one == other


@pytest.mark.parametrize("factor", [1e-30, 1e-8, 1.0, 1e30])
def test_half_precision_neither_overflows_nor_vanishes(factor: float) -> None:
    """Gradients of a mean over a large batch are tiny, and those of a loss that explodes are huge."""
    values = factor * torch.randn(1001)
    got = values.clone()
    FP16Compression(1).all_reduce(got, 0, 0, LoopbackTransport(), nullcontext)
    assert torch.allclose(got, values, rtol=2e-3, atol=float(values.abs().max()) * 1e-10)
    for poison in (math.nan, math.inf):
        got = values.clone()
        got[3] = poison
        FP16Compression(1).all_reduce(got, 0, 0, LoopbackTransport(), nullcontext)
        assert not torch.isfinite(got[3])


def test_what_top_k_keeps_back_is_sent_later_and_all_of_it_arrives() -> None:
    torch.manual_seed(0)
    hook, given, arrived = TopKCompression(1, 0.1), torch.zeros(500), torch.zeros(500)
    for step in range(200):
        gradient = torch.randn(500) if step < 50 else torch.zeros(500)
        given += gradient
        hook.all_reduce(gradient, 0, step, LoopbackTransport(), nullcontext)
        assert int(gradient.count_nonzero()) <= 50
        arrived += gradient
    assert torch.allclose(arrived, given, atol=1e-4)


def test_a_step_that_is_done_again_finds_the_same_kept_back() -> None:
    torch.manual_seed(0)
    hook, other = TopKCompression(1, 0.1), TopKCompression(1, 0.1)
    gradients = torch.randn(4, 100)
    for step, gradient in enumerate(gradients):
        expected = gradient.clone()
        other.all_reduce(expected, 0, step, LoopbackTransport(), nullcontext)
        for _ in range(3 if step == 2 else 1):  # the same step: what failed was somewhere else
            got = gradient.clone()
            hook.all_reduce(got, 0, step, LoopbackTransport(), nullcontext)
            assert torch.equal(got, expected)
    broken = torch.full((100,), math.nan)
    hook.all_reduce(broken, 0, 4, LoopbackTransport(), nullcontext)
    last, expected = torch.randn(2, 100).unbind()
    last = expected.clone()
    hook.all_reduce(last, 0, 5, LoopbackTransport(), nullcontext)
    other.all_reduce(expected, 0, 4, LoopbackTransport(), nullcontext)
    assert torch.isfinite(last).all(), "what is not a number is not kept"


def test_with_feedback_one_percent_of_the_gradient_leads_to_the_same_place() -> None:
    """Least squares in 200 dimensions; without feedback the small directions would never be learned."""
    torch.manual_seed(0)
    scales = torch.logspace(0, -1, 200)
    data = torch.randn(500, 200) * scales
    truth = torch.randn(200)

    def loss_after(fraction: float) -> float:
        weights, hook = torch.zeros(200), TopKCompression(1, fraction)
        for step in range(3000):
            gradient = data.T @ (data @ (weights - truth)) / len(data)
            hook.all_reduce(gradient, 0, step, LoopbackTransport(), nullcontext)
            weights -= 0.005 * gradient
        return float(((data @ (weights - truth)) ** 2).mean())

    exact, begun = loss_after(1.0), float(((data @ truth) ** 2).mean())
    assert loss_after(0.01) < exact + 0.01 * begun


@pytest.mark.parametrize("kind", ["normal", "equal", "few", "poison", "sorted"])
def test_the_largest_are_found_by_a_sample_as_well(kind: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(100_000)
    if kind == "equal":
        values[:] = 1.0
    if kind == "few":
        values[500:] = 0.0
    if kind == "sorted":
        values = values.sort().values
    if kind == "poison":
        values[77] = math.nan
    found = largest(values, 1000)
    assert len(found) == len(found.unique()) == 1000
    expected = values.abs().topk(1000).values
    got = values.abs()[found].sort(descending=True).values
    assert torch.equal(got, expected.sort(descending=True).values) or kind == "poison"
    assert kind != "poison" or 77 in found.tolist()


def test_a_peer_that_dies_in_a_compressed_sum_wakes_everybody(worlds: Callable[[int], list[World]]) -> None:
    world = worlds(3)
    all_to_all = TorchTransport.all_to_all

    def fail(transport: TorchTransport, output: Tensor, input_: Tensor) -> None:
        if transport.group.rank() == 2:
            world[2].group.fail("n2 is gone")  # type: ignore[union-attr]
            raise RuntimeError("n2 is gone")
        world[transport.group.rank()].group.fail("n2 is gone")  # type: ignore[union-attr]
        all_to_all(transport, output, input_)

    def work(one: World) -> str:
        step = step_of(network(), one, communication="fp16")
        with pytest.raises(GroupError) as failed:
            step(batch(one.rank, 3, 0), 0, 1e-3, StepFlags())
        return str(failed.value)

    with mock.patch.object(TorchTransport, "all_to_all", fail):
        assert at_once(work, world) == ["n2 is gone"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("communication", [pytest.param("fp16", marks=pytest.mark.long), "topk"])
def test_a_node_that_is_killed_while_gradients_are_compressed(begin: Callable[..., Nodes], communication: str) -> None:
    """Those who are left go on from the step that failed; what had been kept back is lost, and nothing else."""
    nodes = begin(communication=communication)
    nodes.start(faults=({"kind": "kill", "at": "all_reduce", "step": 6, "node": 1},))
    assert nodes.wait() == [0, KILLED, 0], nodes.log()
    result = nodes.job.result()
    assert (result["status"], result["world_size"]) == ("succeeded", 2)
    assert find_coverage_errors(result["consumed"], result["train_samples"], round(result["epochs"])) == []
    assert not nodes.job.events("resume")


def test_settings_that_do_not_go_together_are_refused_and_others_fall_back() -> None:
    with pytest.raises(ConfigError, match=r"'topk' cannot be combined with training.precision = 'fp16'.*'bf16'"):
        DistributedTrainingConfig(communication="topk", precision="fp16")
    for nodes in ((0, 0), (0, 1, 2)):
        assert type(make_comm_hook("hierarchical", nodes, 0.01)) is CommHook
    doubles: CommHook
    for doubles in (FP16Compression(2), TopKCompression(2, 0.1)):
        values = torch.randn(10, dtype=torch.float64)
        before = copy.deepcopy(values)
        doubles.all_reduce(values, 0, 0, LoopbackTransport(), nullcontext)
        assert torch.equal(values, before)
        assert doubles.bytes_of(values) == values.nbytes

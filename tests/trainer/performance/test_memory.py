"""What a rank needs of memory: the formula, and the formula against what ranks really hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_worlds import on_two_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trainer.comm.world import World
from trainer.config import DistributedTrainingConfig
from trainer.data.batches import Batch, Samples
from trainer.engine.sharded import ShardedStep
from trainer.engine.state import Entry
from trainer.engine.steps import StepFlags
from trainer.engine.workload import kinds_of
from trainer.model.blocks import find_blocks
from trainer.model.sizes import model_bytes, sample_bytes
from trainer.model.task import SupervisedTask
from trainer.parallel.replicas import plan_replicas
from trainer.parallel.shard_collectives import ShardCollectives
from trainer.parallel.sharding import ShardedModel
from trainer.performance.memory import GIB, ModelBytes, count_sharing, most_samples, rank_bytes, zero_rank_bytes
from trainer.runtime.fault_injection import Faults
from trainer.runtime.step_timer import StepTimer

MODEL = ModelBytes(parameters=GIB, trained=GIB // 2, block=GIB // 8, rest=0, sample=float(GIB // 64))


def test_parameters_gradients_and_moments_are_divided_among_those_who_share() -> None:
    whole, shared = rank_bytes(MODEL, 1), rank_bytes(MODEL, 4)
    assert (whole.parameters, whole.gradients, whole.moments, whole.gathered) == (GIB, GIB // 2, GIB, 0)
    assert shared.held == whole.held // 4
    assert shared.gathered == 4 * MODEL.block
    assert rank_bytes(MODEL, 4, gather_precision="bf16").gathered == 3 * MODEL.block
    assert rank_bytes(MODEL, 4, 16).total - shared.least == GIB // 4
    assert rank_bytes(MODEL, 4, 16, precision="bf16").activations == GIB // 8


@pytest.mark.parametrize(
    ("strategy", "sharing"), [("ddp", 1), ("fsdp", 8), ("hsdp", 4), ("another", 1)]
)  # fmt: skip
def test_how_many_share_follows_from_the_strategy(strategy: str, sharing: int) -> None:
    assert count_sharing(strategy, 8, 4) == sharing


def test_the_largest_micro_batch_depends_on_how_many_share() -> None:
    assert most_samples(rank_bytes(MODEL, 1, 1), 3 * GIB) == 32
    assert most_samples(rank_bytes(MODEL, 4, 1), 3 * GIB) == 120
    assert most_samples(rank_bytes(MODEL, 1, 1), 2 * GIB) == 0
    assert most_samples(rank_bytes(ModelBytes(parameters=1, trained=1), 1, 1), GIB) is None, (
        "what a sample takes is not known"
    )


def test_zero_holds_the_model_twice_up_to_stage_2_and_parts_of_the_rest():
    """Counted once by the tensors of four ranks after an update, when gradients are gone: 2.75 of the weights with
    stages 1 and 2."""
    model = ModelBytes(parameters=400, trained=400)
    for stage, weights in ((1, 900), (2, 900), (3, 600)):
        need = zero_rank_bytes(model, stage, 4)
        assert (need.parameters, need.gradients, need.moments, need.gathered) == (weights, 100, 200, 0)
    assert zero_rank_bytes(model, 2, 4).held - 100 == 2.75 * 400


class Network(nn.Module):
    """Blocks, and layers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(3))
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)[:, 0]


def test_a_model_is_counted_without_its_memory_too() -> None:
    real = model_bytes(Network())
    with torch.device("meta"):
        assert model_bytes(Network()) == real
    assert real.parameters == real.trained == sum(item.nbytes for item in Network().parameters())
    assert real.block == 4 * (32 * 96 + 96 + 96 * 32 + 32)
    assert real.rest == real.parameters - 3 * real.block


def test_a_sample_is_measured_by_the_tensors_that_live_at_once() -> None:
    network = Network()

    def run(samples: int) -> None:
        network(torch.zeros(samples, 4)).sum().backward()

    run(2)
    blocks = 4 * 3 * (32 + 2 * 96)  # what each keeps: its input, and what GELU gets and gives
    assert sample_bytes(run, 8, 16) == blocks + 4 * (4 + 32), "and the inputs of the other layers"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_hold_what_the_formula_says(strategy: str) -> None:
    """Counted from the tensors, after steps: by resident memory, other things would hide it."""
    expected = rank_bytes(model_bytes(Network()), count_sharing(strategy, 2, 1))
    for held in on_two_ranks(lambda world: held_by(world, strategy)):
        assert held == pytest.approx(expected.held, rel=0.03)  # of an odd number of rows, the first rank has one more


def held_by(world: World, strategy: Any) -> int:
    """The bytes of parameters, gradients and moments of a rank after a step of training."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    config = DistributedTrainingConfig(strategy=strategy, world_size=2, batch_size_per_gpu=4)
    task = SupervisedTask(nn.MSELoss(reduction="none"))
    make_step, make_state = kinds_of(strategy)
    step = make_step(Network(), task, config, cpu, Faults({}, 0))
    make_state(step).enter(world, Entry(), lambda _: None)
    step.adopt(world)
    numbers = range(world.rank, 4, 2)
    for at in range(2):
        parts = tuple(Samples(number, 4, (torch.ones(4, 4), torch.zeros(4))) for number in numbers)
        step(Batch(16, parts, 0), at, 1e-3, StepFlags())
    if isinstance(step, ShardedStep):
        tensors = [*step.sharded.rows.values(), *(step.sync.flat_gradients() or ())]
    else:
        tensors = [*step.parameters, *(item.grad for item in step.parameters if item.grad is not None)]
    for state in step.optimizer.state.values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_what_a_rank_gathers_at_once_is_about_what_the_formula_says() -> None:
    """By what the allocator gives out in a pass. The other ranks' rows are not fetched: only their memory counts."""
    network, size = torch.nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(6))), 4
    model, cpu = model_bytes(network), torch.device("cpu")
    sharded = ShardedModel(network, find_blocks(network), DistributedTrainingConfig(strategy="fsdp"), cpu)
    rows = {name: sharded.take_rows(name, value.detach(), 0, size) for name, value in network.named_parameters()}
    sharded.shard(0, size, rows)
    alone: Any = SimpleNamespace(group=None, rank=0)
    ShardCollectives(alone, plan_replicas("fsdp", list(range(size))), StepTimer(False, cpu)).connect(network)

    def run() -> None:
        network(torch.zeros(1, 128)).sum().backward()
        sharded.clear_gradients()

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run()
    events = [item for item in measured.profiler.kineto_results.events() if item.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for item in sorted(events, key=lambda event: event.start_ns()):
        now += item.nbytes()
        most = max(most, now)
    expected = rank_bytes(model, size)
    assert most == pytest.approx(expected.gathered + expected.gradients, rel=0.25)

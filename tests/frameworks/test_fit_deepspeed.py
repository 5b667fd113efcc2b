"""Trainings whose gradients and optimizer are DeepSpeed's: losses of DDP, and checkpoints that any strategy takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.elastic_nodes import KILLED, QUICK, Nodes
from harness.worlds import Job
from tests.frameworks.strategy_jobs import (
    FEW,
    MakeJob,
    assert_equal,
    by_ddp,
    cache,
    dataset,
    largest_difference,
    needs,
    new_job,
)
from trainer.exit_codes import LOST

__all__ = ["by_ddp", "cache", "dataset", "new_job"]
pytestmark = [pytest.mark.slow, pytest.mark.long, needs("deepspeed")]
SAME = 1e-5
"""What the order of sums, and of operations in the update, may change; on some processors 2e-6 was seen."""
ONE_RANK = """
import sys, torch, torch.distributed as dist
from trainer.config import DistributedTrainingConfig
from trainer.engine.deepspeed_step import ZeroEngine
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model[0].weight.mine = "kept"
config = DistributedTrainingConfig(strategy="deepspeed", zero_stage=int(sys.argv[1]), batch_size_per_gpu=4)
engine, before = ZeroEngine(model, config, 0, 1, torch.device("cpu")), model[0].weight.detach().clone()
engine.begin_pass(is_last=True)
engine.backward(engine.model(torch.randn(4, 4)).square().mean())
engine.update()
engine.take_weights(model)
engine.close()
assert (engine.module is model) == (config.zero_stage < 3)
assert not torch.equal(model[0].weight, before), "it was trained"
assert not [item for item in model.modules() if item._forward_hooks or item._forward_pre_hooks or item._backward_hooks]
assert [vars(item) for item in model.parameters()] == [{"mine": "kept"}, *({} for _ in range(5))]
assert len({item.untyped_storage().data_ptr() for item in model.parameters()}) == 6, "each in memory of its own"
model(torch.randn(4, 4)).sum().backward()
assert all(item.grad is not None for item in model.parameters())
print("done", flush=True)
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_those_of_ddp(new_job: MakeJob, by_ddp: Job, stage: int) -> None:
    job = new_job(strategy="deepspeed", zero_stage=stage)
    assert job.run(2) == [0, 0], job.log()
    assert_equal(job, by_ddp, SAME)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_model_itself_is_trained_where_ranks_hold_it_whole_and_is_as_any_other_afterwards(stage: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | {"LOCAL_RANK": "0"}
    command = [sys.executable, "-c", ONE_RANK, str(stage)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "done" in done.stdout, done.stderr


def test_one_rank_needs_no_launcher(new_job: MakeJob, by_ddp: Job) -> None:
    """In a process of its own: DeepSpeed and TensorFlow, which other tests load into this one, do not go together."""
    job = new_job(strategy="deepspeed", zero_stage=2)
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"} | job.environment
    command = [sys.executable, "-m", "trainer", "--config", str(job.write())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert_equal(job, by_ddp, SAME)


def test_ranks_with_unequally_many_micro_batches_make_equally_many_passes(new_job: MakeJob, by_ddp: Job) -> None:
    """Three micro-batches for two ranks: one of them makes a pass without a share."""
    odd = {"gradient_accumulation_steps": 1, "max_steps": 6, "eval_frequency": 3}
    mine, theirs = new_job("zero", strategy="deepspeed", zero_stage=2, **odd), new_job("ddp", **odd)
    for job in (mine, theirs):
        assert job.run(2) == [0, 0], job.log()
    assert_equal(mine, theirs, SAME)


def test_checkpoints_go_from_stage_to_stage_by_way_of_ddp(new_job: MakeJob, by_ddp: Job) -> None:
    """Moments and the best weights so far go along; ranks may be more or fewer."""
    job = new_job()
    for ranks, strategy, stage, steps in (
        (2, "deepspeed", 1, 5),
        (1, "ddp", 1, 8),
        (2, "deepspeed", 3, 12),
        (2, "ddp", 1, None),
    ):
        job.training |= {"strategy": strategy, "zero_stage": stage, "max_steps": steps}
        job.processes.clear()
        assert job.run(ranks) == [0] * ranks, job.log()
    assert_equal(job, by_ddp, SAME)


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_of_the_host_learn_the_same(new_job: MakeJob, by_ddp: Job, stage: int) -> None:
    job = new_job(strategy="deepspeed", zero_stage=stage, cpu_offload=True)
    assert job.run(2) == [0, 0], job.log()
    assert_equal(job, by_ddp, SAME)


def test_half_precision_and_activations_that_are_computed_twice(new_job: MakeJob) -> None:
    few = {"precision": "bf16", "activation_checkpointing": True, "max_steps": 8}
    mine, theirs = new_job("zero", strategy="deepspeed", zero_stage=3, **few), new_job("ddp", **few)
    for job in (mine, theirs):
        assert job.run(2) == [0, 0], job.log()
    assert largest_difference(mine, theirs) <= 1e-3


def test_a_gradient_that_is_not_finite_ends_the_training_before_it_touches_the_weights(new_job: MakeJob) -> None:
    job = new_job(strategy="deepspeed", zero_stage=2, learning_rate=1e30, clip_norm=None)
    assert job.run(2) == [1, 1], job.log()
    assert "not finite at step" in job.result()["error"]


@pytest.fixture
def begin(new_job: MakeJob) -> Iterator[Callable[..., Nodes]]:
    """Makes the nodes of a job; none of their processes outlives the test."""
    made: list[Nodes] = []

    def make(**training: Any) -> Nodes:
        made.append(Nodes(new_job("nodes", None, **{**QUICK, **FEW, **training})))
        return made[-1]

    yield make
    for nodes in made:
        nodes.kill()


def test_when_a_node_is_lost_all_leave_and_go_on_from_the_checkpoint(begin: Callable[..., Nodes], by_ddp: Job) -> None:
    """With an exit code after which a cluster starts them again."""
    fault = {"kind": "kill", "at": "all_reduce", "step": 6, "node": 1}
    nodes = begin(strategy="deepspeed", zero_stage=2).start(world=2, faults=(fault,))
    assert nodes.wait() == [LOST, KILLED], nodes.log()
    assert nodes.start(world=2, launch=2).wait() == [0, 0], nodes.log()
    assert [item["step"] for item in nodes.job.events("resume")] == [5] * 2
    assert_equal(nodes.job, by_ddp, SAME)

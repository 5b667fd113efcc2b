"""Trainings whose ranks share the model: the same losses as one rank that holds all of it, also when nodes are lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority

from harness.elastic_nodes import KILLED, Nodes, assert_undisturbed
from harness.worlds import Job, assert_same_training

pytestmark = pytest.mark.slow
Begin = Callable[..., Nodes]
FEW = {"epochs": 2, "eval_frequency": 5, "checkpoint_frequency": 4, "schedule": "constant", "warmup_steps": 0}


@pytest.fixture(scope="module")
def whole(dataset: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The training of one rank that holds the whole model."""
    environment = {"DTRAIN_CACHE": str(cache)}
    job = Job(tmp_path_factory.mktemp("whole"), dataset, training=FEW, environment=environment)
    assert job.run_here() == 0, job.result()
    return job


def kill(at: str, step: int, node: int) -> dict[str, Any]:
    return {"kind": "kill", "at": at, "step": step, "node": node}


def assert_equal(job: Job, whole: Job) -> None:
    """The same losses in each step and the same weights in the end, to rounding; all ranks have them."""
    assert job.result()["weights_equal_on_ranks"], job.result()
    mine, theirs = job.losses(), whole.losses()
    assert mine.keys() == theirs.keys()
    assert max(abs(mine[step] - theirs[step]) for step in mine) <= 1e-5
    assert_same_training(job, whole)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_share_the_model_learn_what_one_does(new_job: Callable[..., Job], whole: Job, ranks: int) -> None:
    """Six micro-batches: with four ranks, two of them make a pass without a share in each step."""
    job = new_job(**FEW, strategy="fsdp", activation_checkpointing=ranks == 2)
    assert job.run(ranks) == [0] * ranks, job.log()
    assert_equal(job, whole)


def test_a_checkpoint_goes_on_with_another_strategy_and_number_of_ranks(
    new_job: Callable[..., Job], whole: Job
) -> None:
    """It ends each time where ``whole`` evaluates too: the best weights so far are part of what goes on."""
    job = new_job(**FEW)
    for ranks, strategy, steps in ((1, "ddp", 5), (3, "fsdp", 10), (2, "ddp", 15), (2, "fsdp", None)):
        job.training |= {"strategy": strategy, "max_steps": steps}
        job.processes.clear()
        assert job.run(ranks) == [0] * ranks, job.log()
    assert_equal(job, whole)


@pytest.mark.parametrize("encrypted", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "at", ["backward", *(pytest.param(at, marks=pytest.mark.long) for at in ("forward", "all_reduce", "optimizer"))]
)
def test_with_a_copy_on_each_node_a_lost_node_costs_no_step(
    begin: Begin, whole: Job, tmp_path: Path, at: str, encrypted: bool
) -> None:
    tls = asdict(Authority(tmp_path).node()) if encrypted else None
    nodes = begin(each=2, **FEW, strategy="hsdp", tls=tls).start(world=2, faults=(kill(at, 6, 1),))
    assert nodes.wait() == [0, 0, KILLED, KILLED], nodes.log()
    assert "2 copies of the model, each over 2" in nodes.log()
    assert_undisturbed(nodes, whole)
    assert not nodes.job.events("resume"), "no step was done anew from a checkpoint"
    assert nodes.history()[-1].step == 6 + (at == "optimizer")


def test_with_one_copy_a_lost_node_costs_the_steps_since_the_checkpoint(begin: Begin, whole: Job) -> None:
    """The survivor goes back in the same process, and so does a rank that comes later."""
    nodes = begin(**FEW, strategy="fsdp").start(world=3, faults=(kill("backward", 10, 1),))
    assert nodes.wait() == [0, KILLED, 0], nodes.log()
    assert_undisturbed(nodes, whole)
    steps = [item["step"] for item in nodes.job.events("resume")]
    assert steps
    assert all(0 <= step <= 10 for step in steps)


def test_a_node_lost_before_the_first_checkpoint_takes_nothing_along(begin: Begin, whole: Job) -> None:
    """All ranks hold rows by then, and a part of the first checkpoint is never written."""
    nodes = begin(**FEW, strategy="fsdp").start(world=3, faults=(kill("save", 0, 1),))
    assert nodes.wait() == [0, KILLED, 0], nodes.log()
    assert_undisturbed(nodes, whole)


def test_who_joins_at_a_step_that_is_saved_saves_it_with_the_others(begin: Begin, whole: Job) -> None:
    """A checkpoint is written by all ranks together: those that have saved this step save it once more."""
    slowly = {"kind": "sleep", "at": "optimizer", "node": 0, "every": True, "seconds": 0.2}
    nodes = begin(**FEW | {"checkpoint_frequency": 1}, strategy="fsdp", collective_timeout_seconds=5)
    nodes.start(world=2, faults=(slowly,)).until_step(3)
    nodes.signal(signal.SIGKILL, 1)
    nodes.until_members(0)
    nodes.start(1, world=2, stay=2).until_members(0, 1)
    assert nodes.wait() == [0, 0], nodes.log()
    assert nodes.members() == [[0, 1], [0], [0, 1]], nodes.log()
    assert_undisturbed(nodes, whole)


def test_ranks_share_the_model_over_encrypted_connections(begin: Begin, whole: Job, tmp_path: Path) -> None:
    nodes = begin(**FEW, strategy="fsdp", tls=asdict(Authority(tmp_path).node())).start(world=2)
    assert nodes.wait() == [0, 0], nodes.log()
    assert_undisturbed(nodes, whole)

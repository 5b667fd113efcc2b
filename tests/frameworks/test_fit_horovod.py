"""Trainings whose gradients Horovod sums: the losses of DDP, also after a resume and when nodes are lost."""

from __future__ import annotations

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

__all__ = ["by_ddp", "cache", "dataset", "new_job"]
pytestmark = [pytest.mark.slow, pytest.mark.long, needs("horovod.torch")]
SAME = 1e-6
"""Horovod and DDP add the same numbers, with three ranks in another order."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_ddp(new_job: MakeJob, by_ddp: Job, ranks: int) -> None:
    job = new_job(strategy="horovod")
    assert job.run(ranks) == [0] * ranks, job.log()
    assert_equal(job, by_ddp, SAME)
    assert "Horovod" not in str(job.events("error"))


def test_half_precision_sends_half_the_bytes_and_rounds_the_losses_a_little(new_job: MakeJob, by_ddp: Job) -> None:
    job = new_job(strategy="horovod", communication="fp16")
    assert job.run(2) == [0, 0], job.log()
    assert 0 < largest_difference(job, by_ddp) <= 2e-3
    whole, half = (one.events("timing")[0]["collectives"][0]["bytes"] for one in (by_ddp, job))
    assert half == whole / 2


def test_one_rank_needs_nobody_to_sum_with(new_job: MakeJob, by_ddp: Job) -> None:
    job = new_job(strategy="horovod")
    assert job.run(1) == [0], job.log()
    assert largest_difference(job, by_ddp) <= SAME


def test_checkpoints_go_from_ddp_to_horovod_and_back(new_job: MakeJob, by_ddp: Job) -> None:
    job = new_job()
    for strategy, steps in (("ddp", 5), ("horovod", 10), ("ddp", None)):
        job.training |= {"strategy": strategy, "max_steps": steps}
        job.processes.clear()
        assert job.run(2) == [0, 0], job.log()
    assert_equal(job, by_ddp, SAME)


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


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_survivors_go_on_when_a_node_is_lost_within_a_sum(begin: Callable[..., Nodes], by_ddp: Job, kind: str) -> None:
    """Horovod waits for the lost node in its sum; its world ends, and another is formed in the same processes."""
    fault = {"kind": kind, "at": "all_reduce", "step": 6, "node": 1}
    nodes = begin(strategy="horovod", peer_timeout_seconds=5).start(faults=(fault,))
    codes = nodes.wait(0, 2)
    assert codes == [0, 0], nodes.log()
    assert [len(members) for members in nodes.members()][-1] == 2
    assert {item.topology for item in nodes.history()} == {"mesh"}, "without Horovod, by a parameter server"
    assert_equal(nodes.job, by_ddp, SAME)
    assert not nodes.job.events("resume")
    if kind == "kill":
        assert nodes.wait(1) == [KILLED]


def test_a_node_that_comes_later_joins(begin: Callable[..., Nodes], by_ddp: Job) -> None:
    slow = {"kind": "sleep", "at": "forward", "node": 0, "every": True, "seconds": 0.2}
    nodes = begin(strategy="horovod").start(0, 1, world=2, faults=(slow,))
    nodes.until_step(2)
    nodes.start(2, world=3)
    assert nodes.wait() == [0, 0, 0], nodes.log()
    assert [0, 1, 2] in nodes.members()
    assert_equal(nodes.job, by_ddp, SAME)

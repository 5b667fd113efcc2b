"""Communication that fails although nobody is lost: retries, parameter-server mode and the way back (D3); TLS (D6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import Authority
from elastic_nodes import KILLED, Nodes, weights
from worlds import Job

from trainer.elastic.generation_record import generations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
Begin = Callable[..., Nodes]


@pytest.fixture
def begin(new_job: Callable[..., Job]) -> Iterator[Callable[..., Nodes]]:
    """Makes the nodes of a job; none of their processes outlives the test."""
    made: list[Nodes] = []

    def make(**training: Any) -> Nodes:
        made.append(Nodes(new_job(**training)))
        return made[-1]

    yield make
    for nodes in made:
        nodes.kill()


def assert_same_training(job: Job, whole: Job) -> None:
    """Weights within 1e-5, and the very same samples."""
    mine, theirs = weights(job), weights(whole)
    for name, tensor in theirs.items():
        assert torch.allclose(mine[name], tensor, rtol=1e-5, atol=1e-6), name
    assert job.result()["consumed"] == whole.result()["consumed"]


@pytest.fixture(scope="module")
def whole(dataset: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The training that nothing disturbed."""
    job = Job(tmp_path_factory.mktemp("whole"), dataset, environment={"DTRAIN_CACHE": str(cache)})
    assert job.run_here() == 0, job.result()
    return job


def test_a_step_is_retried_then_goes_through_one_rank_and_all_reduce_comes_back(begin: Begin, whole: Job) -> None:
    """Node 1 comes too late to its all-reduce four times in a row; nobody is lost."""
    late = {"kind": "sleep", "at": "all_reduce", "step": 7, "node": 1, "seconds": 2.5}
    nodes = begin(
        collective_timeout_seconds=1, peer_timeout_seconds=15, health_check_seconds=1, allreduce_retry_seconds=0.01
    ).start(faults=(late,) * 4)
    assert nodes.wait() == [0, 0, 0], nodes.log()
    job = nodes.job
    history = generations(job.rundir.storage)
    assert [item.attempt for item in history[:5]] == [0, 1, 2, 3, 4]
    assert [item.topology for item in history[:5]] == ["mesh"] * 4 + ["star"], (
        "three retries, then parameter-server mode"
    )
    assert {item.topology for item in history[5:]} == {"mesh"}, "and all-reduce again when it works"
    assert all(len(item.members) == 3 for item in history), "nobody was left out"
    assert [item.step for item in history[:5]] == [0, 7, 7, 7, 7]
    errors = [item for item in job.events("communication_error") if item["generation"] == history[0].number]
    assert {item["rank"] for item in errors} >= {0, 2}
    said = errors[0]
    assert "gradient bucket 0" in said["operation"]
    assert said["waited_seconds"] >= 0.9
    assert said["error"]
    assert len(said["peers"]) == 2
    assert all(view.startswith("here") for view in said["peers"].values())
    assert_same_training(job, whole)


def test_with_tls_the_same_training_goes_on_without_the_rank_0_that_is_killed(
    begin: Begin, whole: Job, tmp_path: Path
) -> None:
    nodes = begin(tls=asdict(Authority(tmp_path).node()))
    nodes.start(faults=({"kind": "kill", "at": "all_reduce", "step": 7, "node": 0},))
    assert nodes.wait() == [KILLED, 0, 0], nodes.log()
    job = nodes.job
    [_, told] = (
        job.events("membership")[-2:] if len(job.events("membership")) > 1 else [None, *job.events("membership")]
    )
    assert told["topology"] == "mesh"
    timing = job.events("timing")
    assert {item["topology"] for item in timing} == {"all-reduce"}
    names = [[one["name"] for one in item["collectives"]] for item in timing]
    assert names == [["bucket 0", "commit"]] * len(timing)
    assert_same_training(job, whole)


def test_a_certificate_that_cannot_be_read_is_named(begin: Begin, tmp_path: Path) -> None:
    files = asdict(Authority(tmp_path).node())
    nodes = begin(tls={**files, "key": str(tmp_path / "no.key")}).start(world=1)
    assert nodes.wait() == [2], nodes.log()
    assert "no.key" in nodes.job.result()["error"]
    assert "training.tls" in nodes.job.result()["error"]

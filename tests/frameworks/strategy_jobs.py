"""Trainings of the stock model whose gradients, or whose optimizer, are another framework's, beside the same by DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.worlds import Job, build
from trainer.runtime.packages import is_installed

FEW = {"epochs": 2, "eval_frequency": 5, "checkpoint_frequency": 4, "schedule": "constant", "warmup_steps": 0}
MakeJob = Callable[..., Job]


def needs(module: str) -> pytest.MarkDecorator:
    """A mark that skips a test where a framework is not installed."""
    name = module.partition(".")[0]
    return pytest.mark.skipif(
        not is_installed(module), reason=f"{name} is not installed: `make setup` does not bring it"
    )


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small dataset; not to be changed."""
    return build(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def new_job(dataset: Path, cache: Path, tmp_path: Path) -> Iterator[MakeJob]:
    """Makes jobs on the small dataset; none of their processes outlives the test."""
    jobs: list[Job] = []

    def make(name: str = "run", environment: dict[str, str] | None = None, **training: Any) -> Job:
        environment = {"DTRAIN_CACHE": str(cache), **(environment or {})}
        jobs.append(Job(tmp_path / name, dataset, training={**FEW, **training}, environment=environment))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


@pytest.fixture(scope="module")
def by_ddp(dataset: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The training of two ranks by DDP."""
    job = Job(tmp_path_factory.mktemp("ddp"), dataset, training=FEW, environment={"DTRAIN_CACHE": str(cache)})
    assert job.run(2) == [0, 0], job.log()
    return job


def weights(job: Job) -> dict[str, torch.Tensor]:
    return torch.load(job.run_dir / "model" / "weights.pt", weights_only=True)


def largest_difference(job: Job, other: Job) -> float:
    """The largest difference of the losses of a step. Both have done the same steps."""
    mine, theirs = job.losses(), other.losses()
    assert mine.keys() == theirs.keys()
    assert len(mine) > 5
    return max(abs(mine[step] - theirs[step]) for step in mine)


def assert_equal(job: Job, other: Job, tolerance: float) -> None:
    """The same losses in each step, and the same weights in the end relative to the largest; all ranks have them, and
    each sample was used once."""
    assert job.result()["weights_equal_on_ranks"], job.result()
    assert job.result()["consumed"] == other.result()["consumed"]
    assert largest_difference(job, other) <= tolerance
    saved, expected = weights(job), weights(other)
    assert list(saved) == list(expected)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert max(float((saved[name] - expected[name]).abs().max()) for name in expected) <= tolerance * largest

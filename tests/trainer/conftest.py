from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for helpers that spawned ranks import as well

from market import Market

from harness.elastic_nodes import QUICK, Nodes
from harness.worlds import Job, build
from trainer.runtime.packages import installed_version
from trainer.strategies import SHARDED_NEED

OF_FSDP = ("fsdp", "hsdp", "test_sharding.py", "test_sharded_training.py", "with_another_strategy", "gathers_at_once")
"""What the names of tests contain that need FSDP2 as it is since `SHARDED_NEED`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed_version("torch") < SHARDED_NEED:
        skip = pytest.mark.skip(reason=f"FSDP2 of torch before {SHARDED_NEED} is refused")
        for item in items:
            if "tests/trainer" in item.nodeid and any(word in item.nodeid for word in OF_FSDP):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def market() -> Market:
    return Market()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small dataset; not to be changed."""
    return build(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def new_job(dataset: Path, cache: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs on the small dataset; none of their processes outlives the test."""
    jobs: list[Job] = []

    def make(name: str = "run", environment: dict[str, str] | None = None, **training: Any) -> Job:
        environment = {"DTRAIN_CACHE": str(cache), **(environment or {})}
        jobs.append(Job(tmp_path / name, dataset, training=training, environment=environment))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


@pytest.fixture
def begin(new_job: Callable[..., Job]) -> Iterator[Callable[..., Nodes]]:
    """Makes the nodes of a job; none of their processes outlives the test."""
    made: list[Nodes] = []

    def make(each: int = 1, sections: dict[str, Any] | None = None, **training: Any) -> Nodes:
        job = new_job(**{**QUICK, **training})
        job.sections |= sections or {}
        made.append(Nodes(job, each))
        return made[-1]

    yield make
    for nodes in made:
        nodes.kill()


@pytest.fixture(scope="session")
def whole(dataset: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A training of 30 steps that nothing disturbed, in a world of one."""
    folder = tmp_path_factory.mktemp("whole")
    job = Job(folder, dataset, training={"keep_checkpoints": 50}, environment={"DTRAIN_CACHE": str(cache)})
    before = signal.getsignal(signal.SIGTERM)
    assert job.run_here() == 0, job.result()
    assert signal.getsignal(signal.SIGTERM) is before, "a process that trains in passing can still be ended"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("reporter", "node", "gather"))]
    return job

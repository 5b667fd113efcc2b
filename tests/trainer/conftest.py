from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for helpers that spawned ranks import as well

from market import Market
from worlds import Job, build


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

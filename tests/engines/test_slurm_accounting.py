"""The engine on a real SLURM with accounting (slurmdbd on MariaDB): limits of accounts and of qualities of service."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.supervision.engine import EngineError, EngineUnreachableError
from dtrain_dagster.settings.slurm import SlurmSettings
from harness.engines.slurm_cluster import SlurmCluster, missing

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def accounted() -> Iterator[SlurmCluster]:
    """A SLURM with one machine, and accounting."""
    if why := missing(accounting=True):
        pytest.skip(why)
    with SlurmCluster(nodes=1, accounting=True) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment().items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture
def launch() -> dict[str, Any]:
    return {"token": os.urandom(24).hex(), "launch": 1, "node_count": 2}


@pytest.fixture
def make(accounted: SlurmCluster, tmp_path: Path) -> Callable[..., SlurmEngine]:
    def engine(shell: str = "sleep 100", **options: Any) -> SlurmEngine:
        return SlurmEngine(SlurmSettings(**options), str(tmp_path), lambda *_: ["/bin/sh", "-c", shell])

    return engine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"extra": ("--account=nix",)}, "correct --account in DTRAIN_SLURM_EXTRA"),
        ({"extra": ("--qos=nix",)}, "correct --qos in DTRAIN_SLURM_EXTRA"),
        ({"extra": ("--qos=short",), "time_limit_minutes": 10}, "lower DTRAIN_SLURM_TIME_LIMIT_MINUTES"),
    ],
)
def test_refusals_of_an_account_name_the_setting(
    make: Callable[..., SlurmEngine], launch: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        make(**options).submit(launch, 0, 1)


def test_a_limit_of_submissions_is_waited_for(
    accounted: SlurmCluster, make: Callable[..., SlurmEngine], launch: dict[str, Any]
) -> None:
    engine = make(extra=("--qos=short",), time_limit_minutes=2)
    first = engine.submit(launch, 0, 1)
    with pytest.raises(EngineUnreachableError, match="takes no more jobs of this user now"):
        engine.submit(launch, 1, 1)
    engine.cancel([first], force=True)
    accounted.wait(lambda: [job.state for job in engine.list_jobs(launch)] == ["ended"], "its end")
    second = engine.submit(launch, 1, 1)
    assert second != first
    engine.cancel([second], force=True)

"""The engine on a real SLURM: what it submits, what it says of it, and how it ends it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.supervision.engine import EngineError, EngineJob
from dtrain_dagster.settings.slurm import SlurmSettings
from harness.engines.slurm_cluster import SlurmCluster
from harness.waiting import until

pytestmark = pytest.mark.slow
IN_ORDER = "trap 'echo ends in order; kill $!; exit 143' TERM; echo node $NODE; sleep 100 & wait"


@pytest.fixture(scope="module", autouse=True)
def commands(slurm: SlurmCluster) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        own = {
            "SQUEUE_FORMAT": "%i",
            "SQUEUE_STATES": "COMPLETED",
            "SBATCH_PARTITION": "nix",
            "SCANCEL_STATE": "PENDING",
        }
        for name, value in slurm.environment(**own).items():  # a person's own settings change nothing
            patch.setenv(name, value)
        yield


@pytest.fixture
def launch() -> dict[str, Any]:
    return {"token": os.urandom(24).hex(), "launch": 1, "node_count": 2}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SlurmEngine]:
    def engine(shell: str = IN_ORDER, **options: Any) -> SlurmEngine:
        return SlurmEngine(
            SlurmSettings(**options), str(tmp_path), lambda launch, node, _: ["/bin/sh", "-c", f"NODE={node}; {shell}"]
        )

    return engine


def wait_for(engine: SlurmEngine, launch: dict[str, Any], state: str, count: int = 1) -> list[EngineJob]:
    def found() -> list[EngineJob]:
        jobs = engine.list_jobs(launch)
        return jobs if len(jobs) == count and all(job.state == state for job in jobs) else []

    return until(found, f"{count} {state}", pause=0.2)


def test_a_node_runs_once_and_ends_in_order(make: Callable[..., SlurmEngine], launch: dict[str, Any]) -> None:
    engine = make(time_limit_minutes=5)
    first = engine.submit(launch, 0, 1)
    assert engine.submit(launch, 0, 1) == first
    assert make().submit(launch, 0, 1) == first, "whoever asks"
    (job,) = wait_for(engine, launch, "running")
    assert (job.id, job.node_id, job.incarnation) == (first, 0, 1)
    assert job.host.startswith("n")
    assert job.ends_at is not None
    assert job.started_at is not None
    assert job.ends_at - job.started_at == 300
    # before, nothing of it is there that a signal could reach
    until(lambda: "node 0" in (engine.read_log(first) or ""), "its output", pause=0.1)
    engine.cancel([first], force=False)
    (job,) = wait_for(engine, launch, "ended")
    assert (job.exit_code, job.lost) == (143, False)
    said = engine.read_log(first) or ""
    assert said.startswith("node 0\n")
    assert "ends in order" in said
    assert engine.list_jobs(launch | {"launch": 2}) == []


def test_an_end_by_force_waits_for_nobody(make: Callable[..., SlurmEngine], launch: dict[str, Any]) -> None:
    engine = make("trap '' TERM; sleep 100; sleep 100")
    names = [engine.submit(launch, node, 1) for node in range(2)]
    wait_for(engine, launch, "running", 2)
    engine.cancel(names, force=True)
    jobs = wait_for(engine, launch, "ended", 2)
    assert all(job.lost for job in jobs)
    engine.cancel(names, force=True)  # once more does nothing


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "nix"}, "correct DTRAIN_SLURM_PARTITION"),
        ({"extra": ("--constraint=nix",)}, "correct --constraint in DTRAIN_SLURM_OPTIONS"),
        ({"gpus": 1}, "correct DTRAIN_NODE_GPUS"),
        ({"extra": ("--nix=1",)}, "correct extra in DTRAIN_SLURM_OPTIONS"),
    ],
)
def test_refusals_name_the_setting(
    make: Callable[..., SlurmEngine], launch: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        make(**options).submit(launch, 0, 1)
    assert make().list_jobs(launch) == []


def test_a_job_that_is_kept_away_from_all_machines_is_refused_at_once_and_its_name_is_used_up(
    make: Callable[..., SlurmEngine], launch: dict[str, Any]
) -> None:
    """Which is why the next incarnation is then submitted without exclusions."""
    with pytest.raises(EngineError, match="node configuration is not available"):
        make().submit(launch, 0, 1, ("n1", "n2", "n3"))
    [refused] = make().list_jobs(launch)
    assert (refused.incarnation, refused.state) == (1, "ended")
    make().submit(launch, 0, 2)
    until(lambda: [job.state for job in make().list_jobs(launch) if job.incarnation == 2] == ["running"], "2 to run")
    make().cancel([job.id for job in make().list_jobs(launch)], force=True)


def test_commands_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch, make: Callable[..., SlurmEngine]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match="set host in DTRAIN_SLURM_OPTIONS"):
        make().check()

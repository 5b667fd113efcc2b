"""Whole trainings on a real SLURM: their weights are those of the local cluster, whatever happens to machines, agents
or slurmctld."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.engine_manager import EngineClusterManager
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.slurm.options import SlurmOptions
from dtrain_dagster.clusters.supervision.engine import EngineJob
from dtrain_dagster.clusters.supervision.jobs import LaunchSettings
from tests.engines.engine_training import (
    STEPS,
    EngineTrials,
    Outcome,
    Training,
    assert_nothing_is_left,
    assert_same,
    incarnations,
    write_job,
)
from tests.engines.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]


class Slurmds:
    """The test cluster's machines."""

    kind = "slurm"

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster

    def options(self, folder: Path) -> dict[str, Any]:
        return {"cpus": 1, "poll_seconds": 0.3, "exclusive": True}

    def too_large(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        return options | {"cpus": 64}, "PartitionConfig: no node of the partition is as large"

    def jobs(self, launch: Mapping[str, Any]) -> list[EngineJob]:
        return SlurmEngine(SlurmOptions(), Path(), lambda *_: ()).list_jobs(launch)

    def kill_node(self, job: EngineJob) -> Callable[[], None]:
        self.cluster.kill(job.host)

        def give_back() -> None:
            self.cluster.start(job.host)
            self.cluster.wait_for_nodes()

        return give_back

    def kill_control_plane(self) -> Callable[[], None]:
        time.sleep(6)  # slurmctld writes its state every 5 s, and forgets later jobs if it is killed
        self.cluster.kill("slurmctld")

        def start() -> None:
            self.cluster.start("slurmctld")
            self.cluster.wait_for_answer()

        return start


@pytest.fixture(scope="module")
def commands(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, with its commands in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.environment().items():
            patch.setenv(name, value)
        yield slurm


class TestSlurm(EngineTrials):
    @pytest.fixture(scope="class")
    @classmethod
    def machines(cls, commands: SlurmCluster) -> Slurmds:
        return Slurmds(commands)

    def test_a_job_is_preempted(self, machines: Slurmds, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        host = next(job.host for job in machines.jobs(training.launch()) if job.node_id == 1)
        machines.cluster.ask(
            "sbatch", "--partition=urgent", f"--nodelist={host}", "--exclusive", "--output=/dev/null", "--time=1",
            "--wrap=sleep 1",
        )  # fmt: skip
        training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a replacement")
        assert_same(training, expected)

    def test_a_time_limit_is_met_by_a_successor(self, machines: Slurmds, tmp_path: Path) -> None:
        settings = LaunchSettings(
            engine="slurm", cluster_name="engine", max_replacements=0, successor_lead_seconds=40.0
        )
        options = machines.options(tmp_path) | {"time_limit_minutes": 1}
        training = Training(EngineClusterManager(tmp_path, settings, options), write_job(tmp_path, 6 * STEPS))
        training.submit()
        training.run_until(lambda: len(incarnations(training)) > 3, "successors of both")
        assert training.end() == JobState.SUCCEEDED, training.said()
        assert (training.rundir.read_json("status.json") or {})["replacements"] == 0
        assert_nothing_is_left(training, machines)

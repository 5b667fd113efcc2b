"""Whole trainings on a real SLURM: their weights are those of the local cluster, whatever happens to machines, agents
or slurmctld."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.managers import EngineClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from harness.engines.engine_training import PACED, STEPS, Outcome, Training, write_job
from harness.engines.machines import Slurmds
from harness.metadata_service import metadata_service
from tests.engines.engine_trials import EngineTrials, assert_nothing_is_left, assert_same, incarnations

pytestmark = [pytest.mark.slow, pytest.mark.long]


class TestSlurm(EngineTrials):
    kind = "slurm"

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

    def test_a_machine_that_will_be_taken_away_is_left_between_two_steps(
        self, machines: Slurmds, tmp_path: Path, expected: Outcome
    ) -> None:
        """The events are emulated. All machines are in use, so that the successor comes once the node has left."""
        settings = LaunchSettings(engine="slurm", cluster_name="engine", max_replacements=0)
        with metadata_service() as service:
            setup = f"export DTRAIN_METADATA_URL={service.url}/$SLURM_JOB_ID"
            manager = EngineClusterManager(tmp_path, settings, machines.options(tmp_path) | {"setup": setup})
            training = Training(manager, write_job(tmp_path, STEPS, model=PACED))
            training.submit()
            training.run_until(lambda: training.step() > 20, "a step")
            service.announce(next(job.id for job in machines.jobs(training.launch()) if job.node_id == 1), seconds=13.0)
            training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a successor")
            assert_same(training, expected)
        left = next(node for node in training.rundir.nodes() if (node.node_id, node.incarnation) == (1, 1))
        assert left.leaves_because.startswith("Preempt")
        assert left.exit_codes == (143,)
        steps = [event["step"] for event in training.rundir.events("step")]
        assert len(steps) == len(set(steps)), "no step was done twice"
        assert_nothing_is_left(training, machines)

    @pytest.mark.timeout(600)
    def test_a_time_limit_is_met_by_a_successor(self, machines: Slurmds, tmp_path: Path) -> None:
        """Successors come after half of the limit, here. SLURM tells a job 60 to 90 s before the limit, so that of two
        minutes would come first."""
        settings = LaunchSettings(engine="slurm", cluster_name="engine", max_replacements=0)
        options = machines.options(tmp_path) | {"time_limit_minutes": 4}
        training = Training(
            EngineClusterManager(tmp_path, settings, options), write_job(tmp_path, 9 * STEPS, model=PACED)
        )
        training.submit()
        training.run_until(lambda: len(incarnations(training)) > 3, "successors of both")
        assert training.end() == JobState.SUCCEEDED, training.said()
        assert (training.rundir.read_json("status.json") or {})["replacements"] == 0
        assert [node.launch for node in training.rundir.nodes()].count(1) == len(training.rundir.nodes())
        assert_nothing_is_left(training, machines)

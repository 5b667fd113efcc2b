"""What may happen to a small training through the manager of an engine's cluster: the same for all engines.

An engine's file of tests names its ``kind`` and inherits `EngineTrials`. What is particular to an engine belongs there.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.clusters.base import ClusterError, JobState
from dtrain_dagster.clusters.hosts import HostEvent
from dtrain_dagster.clusters.managers import EngineClusterManager
from dtrain_dagster.clusters.supervision.launch import LaunchSettings
from harness.engines.engine_training import (
    NODES,
    PACED,
    STEPS,
    WAIT_SECONDS,
    Outcome,
    Training,
    own_models,
    train_here,
    write_job,
)
from harness.engines.machines import Machines, missing, open_machines, variables
from harness.waiting import until
from trainer.data.coverage import find_coverage_errors
from trainer.rundir import RunDir

TOLERANCE = 5e-3
"""Sums over another number of ranks are rounded differently, and many steps make that larger. That no sample was lost,
or used twice, is compared exactly."""
SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainer import DistributedConfig, Trainer

inputs = torch.randn(150, 2, generator=torch.Generator().manual_seed(0))
points = TensorDataset(inputs, (inputs[:, 0] > 0).long())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
Trainer(model, DistributedConfig(epochs=int(sys.argv[1]), batch_size_per_gpu=10)).fit(points, points)
"""


class EngineTrials:
    """What a training has to survive on every engine. A subclass names its ``kind``."""

    kind: ClassVar[str]

    def as_a_person(self, machines: Any, words: list[str]) -> list[str]:
        """The command that enters a node, as somebody has to give it here; empty where it cannot be tried."""
        return words

    @pytest.fixture(scope="class")
    @classmethod
    def machines(cls) -> Iterator[Any]:
        if why := missing(cls.kind):
            pytest.skip(why)
        with own_models(), open_machines(cls.kind, NODES) as opened:
            yield opened

    @pytest.fixture(autouse=True)
    def own_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tests begin without any of our variables."""
        monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "paced")

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
        """The same training on the local cluster, with as many nodes."""
        return train_here(tmp_path_factory.mktemp("here"))

    @pytest.fixture
    def training(self, machines: Machines, tmp_path: Path) -> Iterator[Training]:
        rundir = write_job(tmp_path, STEPS, model=PACED)
        settings = LaunchSettings(engine=machines.kind, cluster_name="engine", replacement_delay_seconds=0.0)
        made = Training(EngineClusterManager(tmp_path, settings, machines.options(tmp_path)), rundir)
        yield made
        made.close()
        assert_nothing_is_left(made, machines)

    def test_it_trains_what_the_local_cluster_trains_and_is_bought_once(
        self, machines: Machines, training: Training, expected: Outcome
    ) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        training.submit()
        assert len(machines.jobs(training.launch())) == NODES
        made = training.outcome()
        assert made[:3] == expected[:3]
        torch.testing.assert_close(made.weights, expected.weights, rtol=0.0, atol=0.0)
        usage = training.manager.node_usage("one")
        assert sorted(node.node_id for node in usage) == [0, 1]
        assert all(node.ended_at > node.started_at for node in usage)
        assert "trains from step 0" in training.manager.job_logs("one", 1)
        training.submit()
        assert len(machines.jobs(training.launch())) <= NODES

    def test_a_node_is_killed(self, machines: Machines, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        lost = next(job for job in machines.jobs(training.launch()) if job.node_id == 1)
        give_back = machines.kill_node(lost)
        try:
            training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a replacement")
            assert_same(training, expected)
        finally:
            give_back()

    def test_a_machine_that_loses_node_after_node_gets_no_more_of_them(
        self, machines: Machines, training: Training, expected: Outcome
    ) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        bad = next(job.host for job in machines.jobs(training.launch()) if job.node_id == 1)
        record = training.manager.host_record()
        assert record is not None
        record.add(HostEvent(host=bad, at=time.time(), kind="lost", seconds=5.0, why="planted"))  # by an earlier job
        for agent in training.processes("--node 1 --incarnation 1"):
            agent.kill()
        training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a replacement")
        jobs = {(job.node_id, job.incarnation): job.host for job in machines.jobs(training.launch())}
        assert jobs[1, 2] not in ("", bad)
        status = training.rundir.read_json("status.json") or {}
        assert [each["host"] for each in status["excluded_hosts"]] == [bad]
        assert_same(training, expected)

    def test_a_node_that_fails_its_pre_flight_is_replaced_before_it_trains(
        self, training: Training, expected: Outcome
    ) -> None:
        is_good = 'test "$NODE_RANK" != 1 || echo "$DTRAIN_LAUNCH" | grep -q incarnation'
        check = f"{is_good} || {{ echo its link is down; exit 3; }}"
        manager = training.manager
        assert isinstance(manager, EngineClusterManager)
        manager.settings = replace(manager.settings, preflight=f"quick: {check}")
        training.submit()
        training.run_until(lambda: incarnations(training) == [(0, 1), (1, 1), (1, 2)], "a replacement")
        assert_same(training, expected)
        good, unfit, better = training.rundir.nodes()
        assert (unfit.preflight, unfit.exit_codes) == ("the site's own check: its link is down", (76,))
        assert (good.preflight, better.preflight) == ("", "")
        assert all(0 < node.preflight_seconds < 60 for node in (good, unfit, better))
        usage = training.manager.node_usage("one")
        assert all(node.preflight_until is not None for node in usage)
        said = training.manager.job_logs("one", 0)
        assert "pre-flight: passed in" in said
        assert "pre-flight warning: its clock" not in said

    def test_a_node_that_failed_is_kept_entered_and_given_back(self, machines: Machines, training: Training) -> None:
        training.submit(command=("sh", "-c", "test $RANK = 0 || exit 3; sleep 600"), keep_failed_seconds=600.0)
        training.run_until(lambda: training.status().kept, "a node that is kept")
        status = training.status()
        (line,) = status.kept
        assert line.startswith("node 1 is kept until ")
        assert status.message.startswith("failed: rank 1 on node 1 failed first (exit code 3)")
        training.run_until(lambda: [node.ended_at is None for node in training.rundir.nodes()] == [False, True], "it")
        at_work = lambda: [job.node_id for job in machines.jobs(training.launch()) if job.state == "running"]  # noqa: E731
        training.run_until(lambda: at_work() == [1], "the end of the other job")
        words = self.as_a_person(machines, shlex.split(line.partition(" UTC: ")[2]))
        if words:  # without a terminal, and for one command of the shell
            words = [word for word in words[:-1] if word not in ("-it", "--pty")]
            done = subprocess.run([*words, "echo", "entered"], capture_output=True, text=True, timeout=60, check=False)
            assert done.stdout == "entered\n", (words, done.stderr)
        training.manager.cancel_job("one")
        assert training.status().state == JobState.FAILED
        (usage,) = [node for node in training.manager.node_usage("one") if node.kept_since is not None]
        assert usage.started_at < usage.kept_since < usage.ended_at

    def test_the_control_plane_is_restarted(self, machines: Machines, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        start = machines.kill_control_plane()
        try:
            before = training.step()
            training.run_until(lambda: training.step() > before + 50, "steps without it")
        finally:
            start()
        assert_same(training, expected)
        assert incarnations(training) == [(0, 1), (1, 1)]

    def test_the_supervisor_is_killed_and_found_again(self, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        supervisors = training.processes("dtrain_dagster.clusters.supervise")
        assert len(supervisors) == 1
        for supervisor in supervisors:
            supervisor.kill()
        psutil.wait_procs(supervisors, timeout=10)
        assert training.status().state == JobState.RUNNING
        assert training.processes("dtrain_dagster.clusters.supervise")
        assert_same(training, expected)
        assert incarnations(training) == [(0, 1), (1, 1)]

    def test_it_is_cancelled_in_order_and_goes_on(self, training: Training, expected: Outcome) -> None:
        training.submit()
        training.run_until(lambda: training.step() > 20, "a step")
        training.manager.cancel_job("one")
        assert training.status().state == JobState.CANCELLED
        assert training.rundir.latest_checkpoint() is not None, "written on SIGTERM"
        assert {node.exit_codes for node in training.rundir.nodes()} == {(143,)}
        training.submit()
        assert_same(training, expected)
        assert training.launch()["launch"] == 2

    def test_a_full_cluster_is_waited_for(self, machines: Machines, training: Training, expected: Outcome) -> None:
        """All machines have others' work: the training waits, and begins by itself when there is room."""
        give_back = machines.fill()
        try:
            training.submit()
            training.run_until(lambda: machines.full in training.status().message, machines.full)
            assert training.status().state == JobState.QUEUED
            assert training.manager.node_usage("one") == []
        finally:
            give_back()
        assert_same(training, expected)
        assert incarnations(training) == [(0, 1), (1, 1)]

    def test_a_script_that_calls_fit_trains(self, machines: Machines, tmp_path: Path) -> None:
        """From the command line, with the settings that a person would make."""
        script, home = tmp_path / "points.py", tmp_path / "home"
        script.write_text(SCRIPT)
        own = {"DTRAIN_HOME": str(home), "DTRAIN_CLUSTER": machines.kind, "DTRAIN_CLUSTER_NAME": "engine"}
        words = ["train", "--script", str(script), "--nodes", str(NODES), "--procs-per-node", "1", "--name", "one"]
        done = subprocess.run(
            [sys.executable, "-c", "from dtrain_dagster.cli.main import main; main()", *words, "--", "3"],
            env=os.environ | variables(machines.kind, machines.options(tmp_path)) | own,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        rundir = RunDir(str(home / "storage" / "jobs" / "one"))
        result = rundir.read_result()
        assert result is not None
        assert result["world_size"] == NODES
        assert result["weights_equal_on_ranks"]
        assert find_coverage_errors(result["consumed"], 150, 3) == []
        assert sorted(node.node_id for node in rundir.nodes()) == list(range(NODES))
        assert all(job.state == "ended" for job in machines.jobs(rundir.read_json("launch.json") or {}))

    def test_bad_settings_are_refused_and_nothing_is_submitted(
        self, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = tmp_path / "job.json"
        job.write_text(json.dumps(write_job(tmp_path / "given", STEPS).read_json("job.json")))
        before = machines.all_jobs()
        own = {"DTRAIN_HOME": str(tmp_path / "home"), "DTRAIN_CLUSTER": machines.kind, "DTRAIN_CLUSTER_NAME": "engine"}
        for number, (changes, said) in enumerate([*machines.bad_settings, ({"DTRAIN_NODES": "300"}, "DTRAIN_NODES")]):
            with monkeypatch.context() as patch:
                for name, value in {**variables(machines.kind, machines.options(tmp_path)), **own, **changes}.items():
                    patch.setenv(name, value)
                told = CliRunner().invoke(main, ["train", "--config", str(job), "--name", f"bad-{number}"])
                assert told.exit_code != 0, (changes, told.output)
                assert said in " ".join(told.output.split()), changes
        manager = EngineClusterManager(
            tmp_path, LaunchSettings(engine=machines.kind, cluster_name="engine"), machines.options(tmp_path)
        )
        training = Training(manager, write_job(tmp_path, STEPS), nodes=300)
        with pytest.raises(ClusterError, match="DTRAIN_NODES=300"):
            training.submit()
        assert machines.all_jobs() <= before

    def test_what_waits_says_why_and_costs_nothing(self, machines: Machines, tmp_path: Path) -> None:
        rundir = write_job(tmp_path, STEPS)
        options, reason = machines.too_large(machines.options(tmp_path))
        settings = LaunchSettings(engine=machines.kind, cluster_name="engine")
        training = Training(EngineClusterManager(tmp_path, settings, options), rundir)
        training.submit()
        training.run_until(lambda: reason in training.status().message, reason)
        assert training.status().state == JobState.QUEUED
        training.manager.cancel_job("one")
        assert training.status().state == JobState.CANCELLED
        assert training.manager.node_usage("one") == []
        assert_nothing_is_left(training, machines)


def incarnations(training: Training) -> list[tuple[int, int]]:
    return [(node.node_id, node.incarnation) for node in training.rundir.nodes() if node.launch == 1]


def assert_same(training: Training, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    made = training.outcome()
    assert made[:3] == expected[:3]
    steps = [event["step"] for event in training.rundir.events("step")]
    assert len(steps) == len(set(steps)), "no step that counts was done twice"
    torch.testing.assert_close(made.weights, expected.weights, rtol=tolerance, atol=tolerance)


def assert_nothing_is_left(training: Training, machines: Machines) -> None:
    until(lambda: not training.processes(), training.processes, pause=0.1)
    assert all(job.state == "ended" for job in machines.jobs(training.launch()))

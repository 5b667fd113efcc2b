"""Nodes are killed under a materialization: it goes on, or it says how to resume and then does."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from dtrain_dagster.clusters.local.manager import LocalClusterManager
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from trainer.rundir import RunDir

from .conftest import checks, metadata, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("probed")]
GRAPH = [dg.AssetKey(name) for name in ("stock_prices", "sharded_dataset", "cost_estimate", "trained_checkpoint")]
LONG = {"epochs": 40, "checkpoint_frequency": 10, "warmup_steps": 3}


def node_processes(home: Path, node: int | None) -> list[psutil.Process]:
    """The trainer's processes of one node, or of all, of jobs under this home."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "trainer" not in line or not any(str(home) in part and "/train-" in part for part in line):
            continue
        if node is None or process.environ().get("NODE_RANK") == str(node):
            found.append(process)
    return found


def job_folder(home: Path) -> Path:
    [folder] = (home / "storage" / "jobs").glob("train-*")
    return folder


class Killer(threading.Thread):
    """Waits until a training has come to a step, then sends a signal to a node, or to all; so often, in as many
    launches."""

    def __init__(
        self, home: Path, node: int | None, step: int, number: signal.Signals = signal.SIGKILL, times: int = 1
    ) -> None:
        super().__init__(daemon=True)
        self.home, self.node, self.step, self.number, self.times, self.killed = home, node, step, number, times, 0
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            time.sleep(0.05)
            folders = list((self.home / "storage" / "jobs").glob("train-*"))
            if not folders or not any(event["step"] >= self.step for event in RunDir(str(folders[0])).events("step")):
                continue
            groups = {os.getpgid(process.pid) for process in node_processes(self.home, self.node)}
            if self.killed and len(groups) < 2:
                continue  # those of the next launch are not all there yet
            for group in groups:
                os.killpg(group, self.number)
            self.killed += len(groups)
            self.times -= 1
            if not self.times:
                return


@pytest.fixture
def small(job: dg.JobDefinition) -> Callable[..., Any]:
    """Materialize up to the checkpoint, in this process, on an instance that stays."""

    def materialize(instance: dg.DagsterInstance, **more: Any) -> dg.ExecuteInProcessResult:
        return run(job, instance, selection=GRAPH, **{**LONG, "more": more})

    return materialize


def test_a_node_is_killed_and_the_checkpoint_is_trained_all_the_same(small: Callable[..., Any], tmp_path: Path):
    """R2.4, R4.2, D2: survivors go on, the cluster replaces the node, and every second of every stay is paid for."""
    home = tmp_path / "home"
    killer = Killer(home, node=0, step=20)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        result = small(instance)
    assert killer.killed == 1
    assert result.success
    assert checks(result)["every_sample_used_once"]
    assert checks(result)["weights_equal_on_all_ranks"]
    told = metadata(result, "trained_checkpoint")
    assert told["generations"] >= 2
    assert "is gone" in told["membership"] or "failed after" in told["membership"]
    rundir = RunDir(str(job_folder(home)))
    stays = [(node.node_id, node.incarnation) for node in rundir.nodes()]
    assert (0, 1) in stays
    assert all(node.ended_at for node in rundir.nodes())
    first = next(node for node in rundir.nodes() if (node.node_id, node.incarnation) == (0, 1))
    assert first.exit_codes == (-signal.SIGKILL,)
    steps = [event["step"] for event in rundir.events("step")]
    assert len(steps) == len(set(steps)), "no step that counts was done twice"
    assert not list(rundir.events("resume")), "nobody had to go back to a checkpoint"
    assert not node_processes(home, None)
    usage = LocalClusterManager(home).node_usage(job_folder(home).name)
    bill = ledger(CostTracker("local", usage, "dedicated").nodes, rundir.events())
    unknown = bill.causes().get(CostCause.UNEXPLAINED)
    assert unknown is None or unknown.microseconds < 0.01 * bill.microseconds, "all that is paid for has a cause"


@pytest.mark.long
def test_a_frozen_node_is_gone_on_without_and_replaced(small: Callable[..., Any], tmp_path: Path):
    """D2: it counts as lost after the timeout; it is not paid for until the end."""
    home = tmp_path / "home"
    killer = Killer(home, node=1, step=20, number=signal.SIGSTOP)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        result = small(instance, health_check_seconds=0.5, peer_timeout_seconds=2, max_steps=900, epochs=900)
    assert killer.killed == 1
    assert result.success
    assert checks(result)["every_sample_used_once"]
    rundir = RunDir(str(job_folder(home)))
    stays = {(node.node_id, node.incarnation): node for node in rundir.nodes()}
    frozen = stays[1, 1]
    assert frozen.exit_codes == (-signal.SIGKILL,)
    assert frozen.ended_at is not None
    assert frozen.ended_at < max(node.ended_at or 0 for node in rundir.nodes()) - 1
    assert (1, 2) in stays
    assert not node_processes(home, None)


@pytest.mark.long
def test_all_nodes_that_are_killed_at_once_are_started_again(small: Callable[..., Any], tmp_path: Path):
    """It is a launch more, from the latest checkpoint, and not the end of the job."""
    home = tmp_path / "home"
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        killer = Killer(home, node=None, step=30)
        result = small(instance)
    assert killer.killed == 2
    assert result.success
    rundir = RunDir(str(job_folder(home)))
    assert max(node.launch for node in rundir.nodes()) == 2
    assert list(rundir.events("resume"))
    assert checks(result)["every_sample_used_once"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_nodes_are_killed_and_materializing_again_resumes(small: Callable[..., Any], tmp_path: Path):
    """R4.4: the checkpoint stays, the asset fails and says how to go on; the next run goes on from it."""
    home = tmp_path / "home"
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        killer = Killer(home, node=None, step=30, times=4)  # the first launch, and the three that follow by themselves
        failed = small(instance)
        assert killer.killed == 8
        assert not failed.success
        [failure] = [event for event in failed.all_events if event.is_step_failure]
        message = failure.step_failure_data.user_failure_data.description  # type: ignore[union-attr]
        assert "materialize" in message
        assert "resume" in message
        latest = json.loads((job_folder(home) / "checkpoints" / "LATEST.json").read_text())
        assert f"step {latest['step']}" in message

        again = small(instance)
    assert again.success
    rundir = RunDir(str(job_folder(home)))  # the same job, in the same folder
    resumed = list(rundir.events("resume"))
    assert {event["step"] for event in resumed} == {latest["step"]}
    assert checks(again)["every_sample_used_once"]

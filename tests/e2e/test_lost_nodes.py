"""A node freezes, or all are killed, under a materialization: it goes on, or it says how to resume and then does. One
node is killed in `test_whole_graph.py`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from trainer.rundir import RunDir

from .conftest import checks, run
from .killing import Killer, job_folder, node_processes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("probed")]
GRAPH = [dg.AssetKey(name) for name in ("stock_prices", "sharded_dataset", "cost_estimate", "trained_checkpoint")]
LONG = {"epochs": 40, "checkpoint_frequency": 10, "warmup_steps": 3}


@pytest.fixture
def small(job: dg.JobDefinition) -> Callable[..., Any]:
    """Materialize up to the checkpoint, in this process, on an instance that stays."""

    def materialize(instance: dg.DagsterInstance, **more: Any) -> dg.ExecuteInProcessResult:
        return run(job, instance, selection=GRAPH, **{**LONG, "more": more})

    return materialize


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

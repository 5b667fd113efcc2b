"""A materialization with a hard budget: the nodes keep it, and a raised one goes on from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest

from dtrain_dagster.costs.prices import price_of
from trainer.rundir import RunDir

from .conftest import checks, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GRAPH = [dg.AssetKey(name) for name in ("stock_prices", "sharded_dataset", "cost_estimate", "trained_checkpoint")]
OPTIONS = {"epochs": 6, "checkpoint_frequency": 10, "warmup_steps": 3}
NODE_SECONDS = 120
"""So many that two nodes start, and make their first steps, beside other tests."""


@pytest.mark.long
@pytest.mark.usefixtures("probed")
def test_a_job_stops_at_its_budget_and_goes_on_when_it_is_raised(
    job: dg.JobDefinition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hangs = {"kind": "sleep", "at": "input", "step": 30, "node": 0, "seconds": 600}  # the probe has fewer steps
    dollars = NODE_SECONDS / 3600 * price_of("Standard_NC6s_v3").usd_per_hour("dedicated")
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        monkeypatch.setenv("DTRAIN_FAULTS", json.dumps([hangs]))
        stopped = run(job, instance, selection=GRAPH, stop_at_usd=dollars, **OPTIONS)
        assert not stopped.success
        [folder] = (tmp_path / "home" / "storage" / "jobs").glob("train-*")
        rundir = RunDir(str(folder))
        result = rundir.read_json("result.json") or {}
        assert result["status"] == "budget"
        [(_, step)] = [rundir.latest_checkpoint() or ("", 0)]
        # usually 30, where it hung; 24 where the epoch's checkpoint was still being written when that of 30 was due
        assert 0 < step <= result["steps"] <= 30
        nodes = rundir.nodes()
        assert {(node.launch, node.incarnation, node.exit_codes) for node in nodes} == {(1, 1, (77,))}, (
            "nobody came again"
        )
        [event] = [event for event in stopped.all_events if event.is_step_failure]
        failure = event.step_failure_data.user_failure_data
        assert failure is not None
        assert "stopped at its budget" in str(failure.description)
        assert "raise stop_at_usd" in str(failure.description)

        again = run(job, instance, selection=GRAPH[2:], stop_at_usd=dollars, **OPTIONS)
        assert not again.success
        assert len(rundir.nodes()) == len(nodes), "nothing is bought for a budget that is spent"

        monkeypatch.delenv("DTRAIN_FAULTS")
        raised = run(job, instance, selection=GRAPH[2:], stop_at_usd=100.0, **OPTIONS)
        assert raised.success
        assert [item["step"] for item in rundir.events("resume")] == [step, step]
        assert "cost_within_estimate" in checks(raised)


@pytest.mark.long
@pytest.mark.usefixtures("shared")
def test_a_plan_that_does_not_fit_buys_nothing(job: dg.JobDefinition, tmp_path: Path):
    jobs = tmp_path / "home" / "storage" / "jobs"
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        refused = run(job, instance, selection=GRAPH, budget_usd=0.001, **OPTIONS)
        assert not refused.success
        [event] = [event for event in refused.all_events if event.is_step_failure]
        assert event.step_key == "cost_estimate"
        failure = event.step_failure_data.user_failure_data
        assert failure is not None
        assert "is not started" in str(failure.description)
        assert "budget_usd is $0.0010" in str(failure.description)
        assert not jobs.exists(), "not even a probe"

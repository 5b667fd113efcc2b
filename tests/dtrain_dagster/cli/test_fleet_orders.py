"""What a job is expected to take where its file does not say, and the list of fleets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.fleet import expect
from dtrain_dagster.cli.main import main
from dtrain_dagster.costs.estimate import Forecast, Measured, Sizes
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, Standing
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.fleet.scheduling import decide
from dtrain_dagster.fleet.source import JobEntry

LIMITS = FleetLimits(budget_usd=10.0, nodes=2, usd_per_node_hour=3.6)


@pytest.mark.parametrize("jobs", [1, 10, 60])
def test_a_first_guess_lets_every_job_begin_within_the_budget(jobs: int):
    known = expect(JobEntry(name="j", dataset="d"), None, LIMITS, jobs)
    assert known["facts"]["basis"].endswith("data and batch on this SKU is known here")
    assert 30 <= known["node_seconds"] <= 1800
    standings = tuple(Standing(job=FleetJob(job_id=f"j{number}", **known), number=number) for number in range(jobs))
    decisions = decide(LIMITS, standings, 0.0)
    assert len(decisions) == min(jobs, LIMITS.nodes), "none is ended for what was only guessed"
    assert all(item.kind == "start" for item in decisions)


def test_a_past_run_on_two_nodes_tells_what_two_take():
    sizes = Sizes(
        train_samples=6400, valid_samples=64, test_samples=64, batch_size_per_rank=32, micro_batches_per_rank=1,
        processes_per_node=1, epochs=3, max_steps=None, eval_frequency=None, checkpoint_frequency=1000, stated_ranks=2,
    )  # fmt: skip
    run = Measured(node_count=2, startup_seconds=7.0, step_seconds=0.5, evaluation_seconds=2.0, finish_seconds=4.0)
    forecast = Forecast(measured=(run,), sizes=sizes, basis="history", basis_words="run a")
    job = FleetJob(job_id="a", nodes=2, **expect(JobEntry(name="a", dataset="d", nodes=2), forecast, LIMITS, 1))
    assert (job.startup_seconds, job.facts) == (7.0, {"basis": "run a"})
    assert 0.1 < job.spread < 1.0
    assert job.node_seconds == pytest.approx(2 * (300 * 0.5 + 3 * 2.0 + 4.0), rel=1e-6)


def test_a_fleet_of_an_older_version_hides_no_other_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    for name in ("new", "old"):
        records = FleetRecords(tmp_path, name)
        records.write_limits(LIMITS, 0.0)
        records.add(FleetJob(job_id=f"{name}-a", node_seconds=1.0), 0)
    path = tmp_path / "fleets" / "old" / "jobs" / "old-a.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "job": {**document["job"], "least_nodes": 1}}))
    told = CliRunner().invoke(main, ["jobs", "--fleets"])
    assert told.exit_code == 0, told.output
    assert "fleet new: 0 of 1 jobs over" in told.output
    assert "fleet old was begun by an older version" in told.output

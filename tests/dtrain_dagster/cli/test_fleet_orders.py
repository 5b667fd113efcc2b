"""What a job is expected to take where its file does not say."""

from __future__ import annotations

import pytest

from dtrain_dagster.cli.fleet import expect
from dtrain_dagster.costs.estimate import Forecast, Measured, Sizes
from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits, Standing
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

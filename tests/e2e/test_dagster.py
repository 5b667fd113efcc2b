"""Webserver, daemon, code server and cluster as they run in production, driven by GraphQL."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from .chromium import chromium, in_a_browser, patient_page
from .conftest import ENDED, GRAPH, LONG, Dagster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def jobs_started(dagster: Dagster, prefix: str = "train-") -> list[str]:
    return sorted(path.name for path in dagster.project.jobs.glob(f"{prefix}*"))


def workers(dagster: Dagster, prefix: str = "train-") -> list[psutil.Process]:
    return [p for p in dagster.project.processes() if any(prefix in part for part in p.info["cmdline"])]


def test_a_run_is_watched_live_terminated_and_found_again(dagster: Dagster):
    """One story, because each part needs a training that is under way (about 10 s to get there)."""
    before, made = jobs_started(dagster), dagster.materializations("trained_checkpoint")

    # A training that would take an hour is watched live …
    run_id = dagster.launch(*GRAPH, config=LONG)

    def at_work() -> list[dict[str, Any]]:
        """What was observed since the first step."""
        seen = [item for item in dagster.observations("trained_checkpoint") if item["runId"] == run_id]
        observed = [item["metadataEntries"] for item in seen]
        labelled = [{entry["label"]: entry for entry in entries} for entries in observed]
        return [entries for entries in labelled if "step" in entries]

    observed = wait_for(lambda: at_work() or dagster.status(run_id) in ENDED, 150, "an observation of a step")
    assert observed is not True, f"the run ended: {dagster.status(run_id)}"
    entries = observed[0]
    assert entries["step"]["intValue"] > 0
    assert entries["nodes_alive"]["intValue"] == 2
    assert {"loss", "eta_seconds", "samples_per_second"} <= entries.keys()
    assert {"cost_so_far_usd", "projected_cost_usd", "estimated_usd", "over_estimate_percent"} <= entries.keys()

    # … loses its orchestrator to kill -9, and goes on …
    first_jobs = jobs_started(dagster)
    assert len(first_jobs) == len(before) + 1
    dagster.worker(run_id).kill()
    wait_for(lambda: dagster.status(run_id) == "FAILURE", 90, "the run to be marked as failed")
    assert workers(dagster), "the job died with its orchestrator"
    assert dagster.materializations("trained_checkpoint") == made

    # … is found again by materializing again, instead of being bought twice …
    second = dagster.launch("trained_checkpoint")
    wait_for(
        lambda: (
            second in {seen["runId"] for seen in dagster.observations("trained_checkpoint")}
            or dagster.status(second) in ENDED
        ),
        60,
        "an observation by the second run",
    )
    assert dagster.status(second) == "STARTED"
    assert jobs_started(dagster) == first_jobs

    # … and is stopped within seconds when that run is terminated; the asset fails.
    dagster.terminate(second)
    wait_for(lambda: dagster.status(second) in ENDED, 40, "the run to end")
    assert dagster.status(second) in ("CANCELED", "FAILURE")
    wait_for(lambda: not workers(dagster), 20, "every process of the job to be gone")
    assert dagster.materializations("trained_checkpoint") == made


def test_a_failing_model_fails_the_run_before_the_training_is_bought(dagster: Dagster):
    options = {"model": "examples.own_model.model:make_model", "model_args": {"no_such_argument": 1}}
    config = {"ops": {"cost_estimate": {"config": options}}}
    trained = jobs_started(dagster)
    run_id = dagster.launch(*GRAPH, config=config)
    wait_for(lambda: dagster.status(run_id) in ENDED, 120, "the run to end")
    assert dagster.status(run_id) == "FAILURE"
    assert jobs_started(dagster) == trained
    text = (
        "query($id: ID!) { logsForRun(runId: $id) { ... on EventConnection { events { "
        "... on ExecutionStepFailureEvent { error { message causes { message } } } } } } }"
    )
    failures = str(dagster.query(text, id=run_id))
    assert "no_such_argument" in failures


@in_a_browser
def test_terminate_from_the_page(dagster: Dagster):
    config = {"ops": {"cost_estimate": {"config": {"epochs": 400, "seed": 7}}}}
    run_id = dagster.launch("cost_estimate", "trained_checkpoint", config=config)
    wait_for(
        lambda: any(seen["runId"] == run_id for seen in dagster.observations("trained_checkpoint")), 120, "progress"
    )
    with chromium() as browser:
        page = patient_page(browser, viewport={"width": 1600, "height": 1000})
        page.goto(f"{dagster.url}/runs/{run_id}")
        page.locator('button:has-text("Terminate")').first.click()
        page.locator('[role="dialog"] button:has-text("Terminate")').last.click()
        wait_for(lambda: dagster.status(run_id) in ENDED, 60, "the run to end")
    assert dagster.status(run_id) in ("CANCELED", "FAILURE")
    wait_for(lambda: not dagster.project.processes(), 20, "every process of the job to be gone")
    assert all(made["runId"] != run_id for made in dagster.materializations("trained_checkpoint"))

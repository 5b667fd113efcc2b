"""A job on the Azure path and its Dagster run, as in production: what becomes of the one when the other ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from harness.azure.azurite import missing
from harness.azure.emulator import Emulator

from .conftest import (
    ENDED,
    GRAPH,
    LONG,
    ON_AZURE,
    ROOT,
    make_project,
    small_prices,
    start_dagster,
    stop_dagster,
    wait_for,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(340)]


def test_a_job_outlives_its_killed_run_is_found_again_and_ends_with_a_terminated_one(tmp_path: Path) -> None:
    """One story, because each part needs a training that is under way."""
    if why := missing():
        pytest.skip(why)
    with Emulator(tmp_path / "cloud") as cloud:
        own = {
            "DTRAIN_PRICES": str(small_prices(tmp_path)),
            "DTRAIN_NODES": "1",
            "PYTHONPATH": os.pathsep.join([cloud.environment["PYTHONPATH"], str(ROOT)]),
        }
        project = make_project(tmp_path / "home", **cloud.environment | ON_AZURE | own)
        # How soon Dagster notices that a run is dead is its own affair; here it would only be waited for.
        config = Path(project.env["DAGSTER_HOME"]) / "dagster.yaml"
        config.write_text(config.read_text().replace("poll_interval_seconds: 15", "poll_interval_seconds: 1"))
        dagster = start_dagster(project)

        def trainings() -> dict[str, Any]:
            jobs: dict[str, Any] = cloud.control("state")["jobs"]
            return {name: job["status"] for name, job in jobs.items() if name.startswith("train-")}

        def watches(run_id: str) -> bool:
            assert dagster.status(run_id) not in ENDED, (tmp_path / "home/ui.log").read_text()[-4000:]
            return run_id in {item["runId"] for item in dagster.observations("trained_checkpoint")}

        try:
            # A training that would take an hour loses the process of its run to kill -9, and goes on …
            first = dagster.launch(*GRAPH, config=LONG)
            wait_for(lambda: watches(first), 240, "an observation")
            dagster.worker(first).kill()
            wait_for(lambda: dagster.status(first) == "FAILURE", 90, "the run to be marked as failed")
            [job] = trainings()
            assert trainings() == {job: "Running"}

            # … is found again by materializing again, and not bought twice …
            second = dagster.launch("trained_checkpoint")
            wait_for(lambda: watches(second), 90, "an observation by the second run")
            assert trainings() == {job: "Running"}
            assert cloud.control("bought")["jobs"][job]["launches"] == 1

            # … and is cancelled when that run is terminated as the UI does it: nothing is left that costs.
            dagster.terminate(second)
            wait_for(lambda: dagster.status(second) in ENDED, 60, "the run to end")
            assert dagster.status(second) == "CANCELED"
            assert trainings() == {job: "Canceled"}
            assert not dagster.materializations("trained_checkpoint")
            cloud.control("clock", advance_seconds=700)
            wait_for(lambda: not cloud.control("bought")["alive_nodes"], 30, "the nodes to be given back")
            assert len(trainings()) == 1
        finally:
            stop_dagster(dagster)

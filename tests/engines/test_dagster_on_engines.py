"""Dagster's daemon and webserver on each engine: why a job waits is shown while it waits, *Terminate* ends everything
on the engine, whatever stage the job is in, and a job whose run and supervisor are both gone is found by the sensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.engines.machines import Machines, missing, open_machines, variables
from tests.e2e.conftest import (
    ENDED,
    GRAPH,
    ROOT,
    Dagster,
    make_project,
    small_prices,
    start_dagster,
    stop_dagster,
    wait_for,
)
from trainer.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
LONG = {"epochs": 4000, "checkpoint_frequency": 500, "warmup_steps": 3}
SITE = 3.75
"""Dollars per node-hour of the partition."""


@contextmanager
def served(kind: str, folder: Path) -> Iterator[tuple[Dagster, Machines, dict[str, Any]]]:
    """A Dagster whose cluster is this engine, and the engine's options."""
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind) as machines:
        options = machines.options(folder)
        own = {"DTRAIN_CLUSTER": kind, "DTRAIN_CLUSTER_NAME": "engine", "DTRAIN_PRICES": str(small_prices(folder)),
               "DTRAIN_OPTIONS": "orphan_policy=cancel orphan_minutes=0.01"}  # fmt: skip
        if kind == "slurm":
            (folder / "site.json").write_text(json.dumps({"main": SITE}))
            options |= {"partition": "main", "prices": str(folder / "site.json")}
        given = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SLURM_CONF") if name in os.environ}
        project = make_project(folder / "home", **variables(kind, options), **own, **given, PYTHONPATH=str(ROOT))
        dagster = start_dagster(project)
        try:
            yield dagster, machines, options
        finally:
            stop_dagster(dagster)
            for process in project.processes():
                process.kill()


def observed(dagster: Dagster, run_id: str, label: str) -> list[str]:
    """What was observed of a run's checkpoint under this label."""
    text = (
        "query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset { assetObservations { runId "
        "metadataEntries { label ... on TextMetadataEntry { text } ... on IntMetadataEntry { intValue } } } } } }"
    )
    found = dagster.query(text, key={"path": ["trained_checkpoint"]})["assetOrError"].get("assetObservations", [])
    return [
        str(entry.get("text") or entry.get("intValue"))
        for seen in found
        if seen["runId"] == run_id
        for entry in seen["metadataEntries"]
        if entry["label"] == label
    ]


def wait_observed(dagster: Dagster, run_id: str, label: str, words: str = "") -> None:
    wait_for(
        lambda: any(words in text for text in observed(dagster, run_id, label)) or dagster.status(run_id) in ENDED,
        200,
        f"an observation of {label}",
    )
    assert dagster.status(run_id) not in ENDED


def trainings(dagster: Dagster) -> list[RunDir]:
    return [RunDir(str(path)) for path in dagster.project.jobs.glob("train-*")]


def assert_all_ended(dagster: Dagster, machines: Machines) -> None:
    """Nothing of any job runs: in the words of the engine, and on this machine."""
    for rundir in trainings(dagster):
        launch = rundir.read_json("launch.json") or {}
        wait_for(lambda: all(job.state == "ended" for job in machines.jobs(launch)), 30, "the engine's jobs to end")  # noqa: B023

    def left() -> list[str]:
        lines = [" ".join(process.cmdline()) for process in dagster.project.processes() if process.is_running()]
        return [line for line in lines if "trainer" in line or "clusters.supervise" in line]

    wait_for(lambda: not left(), 30, "every process of the job to be gone")


def cluster_config(dagster: Dagster) -> dict[str, Any]:
    """The cluster as the launchpad shows it."""
    code = (
        "import json; from dtrain_dagster.resources import build_resources; "
        "from dtrain_dagster.settings.environment import load_settings; "
        "print(json.dumps(build_resources(load_settings())['cluster'].model_dump()))"
    )
    done = dagster.project.cli("python", "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stdout
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ray"])
def test_what_waits_is_shown_and_terminate_ends_all(kind: str, tmp_path: Path) -> None:
    with served(kind, tmp_path) as (dagster, machines, options):
        config = {"ops": {"cost_estimate": {"config": LONG}}}
        trains = dagster.launch(*GRAPH, config=config)
        wait_observed(dagster, trains, "step")
        assert dagster.project.processes()
        if kind == "slurm":
            [made] = dagster.materializations("cost_estimate")
            texts = {entry["label"]: entry.get("text", "") for entry in made["metadataEntries"]}
            assert texts["price"].startswith(f"{SITE:.2f} USD per node-hour: Standard_NC6s_v3@main"), texts["price"]
        dagster.terminate(trains)
        wait_for(lambda: dagster.status(trains) in ENDED, 60, "the run to end")
        assert_all_ended(dagster, machines)
        [rundir] = trainings(dagster)
        assert (rundir.read_json("status.json") or {})["state"] == "cancelled"

        too_large, reason = machines.too_large(options)
        cluster = {**cluster_config(dagster), "engine": too_large}
        waits = dagster.launch("trained_checkpoint", config={"resources": {"cluster": {"config": cluster}}})
        wait_observed(dagster, waits, "waiting", reason)
        before = len(rundir.nodes())
        dagster.terminate(waits)
        wait_for(lambda: dagster.status(waits) in ENDED, 60, "the run to end")
        assert_all_ended(dagster, machines)
        assert len(rundir.nodes()) == before, "nothing that waited was paid for"


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ray"])
def test_a_job_without_run_and_supervisor_is_found_and_ended(kind: str, tmp_path: Path) -> None:
    with served(kind, tmp_path) as (dagster, machines, _):
        run_id = dagster.launch(*GRAPH, config={"ops": {"cost_estimate": {"config": LONG}}})
        wait_observed(dagster, run_id, "step")
        [rundir] = trainings(dagster)
        supervisors = [one for one in dagster.project.processes() if "clusters.supervise" in " ".join(one.cmdline())]
        assert supervisors
        worker = dagster.worker(run_id)
        for process in (worker, *supervisors):
            process.kill()
        psutil.wait_procs(supervisors, timeout=10)
        step = max(event["step"] for event in rundir.events("step"))
        wait_for(lambda: max(event["step"] for event in rundir.events("step")) > step, 60, "nodes that train on")
        wait_for(lambda: dagster.status(run_id) in ENDED, 120, "the run to be marked as failed")
        wait_for(lambda: (rundir.read_json("status.json") or {})["state"] == "cancelled", 300, "the sensor to end it")
        assert_all_ended(dagster, machines)

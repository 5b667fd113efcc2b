"""A home with jobs, a fleet and a search as they lie on disk, for tests of commands that only read."""

from __future__ import annotations

import json
import time
from pathlib import Path

from told_events import told, write_run

from dtrain_dagster.fleet.jobs import FleetJob, FleetLimits
from dtrain_dagster.fleet.records import FleetRecords
from dtrain_dagster.search.results import result_document
from dtrain_dagster.search.trials import SearchSettings, Trial, TrialState
from trainer.rundir import EVALUATION, LAUNCH, RESULT

LONG = "search-20261126-142501-ab12-0003"
JOBS = {"train-6f66ac60-b41d1ccc": "succeeded", LONG: "failed", "night": "cancelled", "nightly": "failed"}
"""Name → state."""
EVALUATED = {
    "model": {"loss": -1.51, "nll": -1.998, "coverage_90": 0.895},
    "baselines": {"ridge": {"nll": -1.997, "model_gain_nll": 0.0005, "model_gain_t": 0.3}},
    "gate": {"passed": True, "reasons": []},
    "notes": [],
}


def write_home(home: Path) -> Path:
    """Write the home, and return the folder of its jobs."""
    jobs = home / "storage" / "jobs"
    for job_id, state in JOBS.items():
        rundir = write_run(jobs, job_id, told(4), state)
        launch = {"job_id": job_id, "launch": 1, "node_count": 3, "processes_per_node": 1, "cluster_name": "local"}
        rundir.write_json(LAUNCH, {**launch, "sku": "Standard_NC6s_v3", "engine": "local"})
        rundir.write_json(RESULT, {"status": state, "steps": 774, "world_size": 3, "epochs": 6.0, "train_seconds": 9.0})
        rundir.write_json(EVALUATION, EVALUATED)
    records = FleetRecords(home, "weekend")
    records.write_limits(FleetLimits(budget_usd=5.0, nodes=3, usd_per_node_hour=3.06), time.time())
    for number, name in enumerate(("weekend-a-model-with-a-long-name", "weekend-b")):
        records.add(FleetJob(job_id=name, node_seconds=60.0), number)
    folder = home / "searches" / "wide"
    folder.mkdir(parents=True)
    (folder / "search.json").write_text(json.dumps({"name": "wide", "began_at": time.time(), "measured_by": []}))
    trials = [
        Trial(
            number=number, values={"training.learning_rate": 0.01 * (number + 1)}, of=3, state=TrialState.COMPLETE,
            scores=(0.5, 0.4 - 0.1 * number), times=(1.0, 2.0 + number), usd=0.01, node_seconds=12.0,
        )
        for number in range(2)
    ]  # fmt: skip
    more = {
        "name": "wide", "dataset_id": "d", "pruner": "asha", "sampler": "gp", "seed": 0, "budget_usd": 1.0,
        "planned": {"at_most_usd": 1.0, "expected_usd": 0.5},
        "settings_file": str(folder / "best.json"),
    }  # fmt: skip
    found = result_document(trials, SearchSettings(), 0.001, more)
    (folder / "result.json").write_text(json.dumps(found))
    return jobs

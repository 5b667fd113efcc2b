"""What the orchestrator adds to a run of a real MLflow."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dtrain_dagster.jobs.orders import source_tags
from dtrain_dagster.registry.run_record import add_to_run, cost_metrics, note_of
from harness.tables import copy_tables
from trainer.documents.schemas import LEAVING
from trainer.observability.mlflow_sink import NOTE_TAG
from trainer.rundir import JOB, LAUNCH, RESULT, TRACKING, RunDir, event

FORMED = {"nodes": [0], "joined": [], "world_size": 1, "topology": "mesh", "step": 1, "seconds": 0.5}
COURSE = [
    event("node", 0, 1, node_id=0, step=1, cpu_percent=50.0),
    event("membership", 0, 2, lost=[1, 2], reason="silent", **FORMED),
    event("membership", 0, 3, lost=[3], reason=LEAVING, **FORMED),
]


@pytest.mark.slow
def test_dollars_reports_and_the_description_come_to_the_run_of_the_job_and_to_no_other(
    tmp_path: Path,
) -> None:
    from mlflow.tracking import MlflowClient

    copy_tables(tmp_path / "mlflow.db")
    uri, rundir = f"sqlite:///{tmp_path}/mlflow.db", RunDir(str(tmp_path / "run"))
    client = MlflowClient(uri)
    experiment = client.create_experiment("e", str(tmp_path / "mlartifacts"))
    run_id = client.create_run(experiment, tags={"job_id": "mine"}).info.run_id
    rundir.write_json(TRACKING, {"mlflow_run_id": run_id})
    rundir.write_json(JOB, {"job_id": "mine"})
    rundir.write_json(LAUNCH, {"node_count": 3, "sku": "big"})
    rundir.write_json(RESULT, {"best_step": 7})
    rundir.storage.write("reports/page.html", b"<p>")
    rundir.append_events(2, 0, 1, COURSE)
    given = {"metrics": {"cost/total_usd": 0.5}, "note": "**good**"}
    assert "MLflow has no run of others" in add_to_run(uri, rundir, "others", **given)  # type: ignore[arg-type]
    assert client.get_run(run_id).data.metrics == {}
    assert add_to_run(uri, rundir, "mine", **given) == ""  # type: ignore[arg-type]
    run = client.get_run(run_id)
    assert run.data.metrics == {"cost/total_usd": 0.5, "lost/nodes": 2, "valid/best_step": 7}
    assert {"nodes": "3", "sku": "big"}.items() <= run.data.tags.items()
    figures = json.loads(Path(client.download_artifacts(run_id, "figures.json", str(tmp_path))).read_text())
    assert figures["node_0/cpu_percent"]["last"] == 50.0
    assert run.data.tags[NOTE_TAG] == "**good**"
    found = {item.path for folder in ("", "reports") for item in client.list_artifacts(run_id, folder)}
    assert {"job.json", "reports/page.html"} <= found


def test_a_server_that_cannot_be_reached_is_told_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    rundir = RunDir(str(tmp_path))
    rundir.write_json(TRACKING, {"mlflow_run_id": "a" * 32})
    said = add_to_run("http://127.0.0.1:9", rundir, "mine")
    assert "MLflow does not have all of mine" in said


def test_the_source_is_the_commit_of_the_folder_that_was_started_in(tmp_path: Path) -> None:
    assert "mlflow.source.git.commit" not in source_tags("dtrain train", tmp_path)
    for command in (
        ("init", "-q", "-b", "main"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"),
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    tags = source_tags("dtrain train", tmp_path)
    assert tags["mlflow.source.name"] == "dtrain train"
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert (tags["mlflow.source.git.branch"], tags["mlflow.source.git.dirty"]) == ("main", "False")


def test_a_bill_becomes_metrics_and_a_verdict_a_description() -> None:
    assert cost_metrics({"total_usd": 1, "why": "words", "node_hours": 0.25}) == {
        "cost/total_usd": 1.0, "cost/node_hours": 0.25,
    }  # fmt: skip
    assert cost_metrics({"usd_per_epoch": 1.0, "goodput_percent": 40.0}) == {}, "these are in the report"
    assert (
        note_of("fast", None, "/r", "http://d") == "**fast**\n\n[The run in Dagster](http://d)\n\nRun directory: `/r`"
    )

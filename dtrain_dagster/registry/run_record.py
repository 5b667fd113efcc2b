"""What the orchestrator adds to a training's run in MLflow once it has ended: dollars, reports, description.

Nodes write the curves while they train (`trainer.observability.mlflow_sink`), and know neither dollars nor reports. A
server that cannot be reached fails nothing here: the figures are in the run directory, too.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain_dagster.registry.versions import JOB_TAG, open_client
from trainer.documents.events import MembershipEvent, read_events
from trainer.errors import DamagedError
from trainer.observability.mlflow_sink import NOTE_TAG, ensure_experiment, summarise
from trainer.observability.mlflow_sqlite import authorised
from trainer.rundir import EVALUATION, JOB, LAUNCH, RESULT, TRACKING, RunDir
from trainer.runtime.scratch import scratch_folder
from trainer.secrets.azure_token import WORKSPACE
from trainer.secrets.redaction import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PARENT_TAG = "mlflow.parentRunId"
REPORTS, FIGURES = "reports", "figures.json"
"""Folders of a run's artifacts, and the file with every curve in short, also those that are no metrics."""
_log = logging.getLogger(__name__)


def add_to_run(
    tracking_uri: str,
    rundir: RunDir,
    job_id: str,
    *,
    metrics: Mapping[str, float] | None = None,
    note: str = "",
) -> str:
    """Add figures, a description, and the job's own files and reports to the run of a job.
    Return why that was impossible, "" if it was not. Azure ML, whose pages have places of their own for all this, is
    left alone."""
    from mlflow.exceptions import MlflowException

    try:
        address = authorised(tracking_uri)
        if is_workspace(address):
            return ""
        client = open_client(address)
        run_id = run_of(client, rundir, job_id)
        if run_id is None:
            return f"MLflow has no run of {job_id}: the log of its first node says why (dtrain logs {job_id})"
        write_to_run(client, run_id, rundir, metrics=metrics or {}, note=note)
    except (MlflowException, OSError, ValueError) as error:
        return f"MLflow does not have all of {job_id} ({redact(str(error))}); its run directory does"
    return ""


def is_workspace(address: str) -> bool:
    """Return whether this is the address of a workspace of Azure ML. Pure."""
    return WORKSPACE in address or address.startswith("azureml:")


class RunGroup:
    """A run in which others are nested: that of a fleet, with those of its jobs, or of a search, with its trials. It is
    found by its tag and they by theirs, so who writes the same again adds what is missing, and nothing twice."""

    def __init__(self, address: str, experiment: str, name: str, tag: tuple[str, str], key: str) -> None:
        """Find it by ``tag``, or begin it with this name. ``key``: the tag that tells nested runs apart. Raise as
        MLflow does."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # by default a dead server costs four minutes
        self.address, self.client = address, open_client(address)
        self.experiment_id = ensure_experiment(self.client, experiment, address)
        known = self._search(f"tags.`{tag[0]}` = '{tag[1]}'")
        tags = {tag[0]: tag[1], NOTE_TAG: "A run for each training of it is nested here."}
        run = known[0] if known else self.client.create_run(self.experiment_id, run_name=name, tags=tags)
        self.run_id: str = run.info.run_id
        self.is_open = run.info.status == "RUNNING"
        nested = self._search(f"tags.`{PARENT_TAG}` = '{self.run_id}'")
        self.nested = {item.data.tags[key]: item for item in nested if key in item.data.tags}
        """Nested runs by that tag, as they were found."""

    def _search(self, condition: str) -> Sequence[Run]:
        order = ["attributes.start_time ASC"]
        return self.client.search_runs([self.experiment_id], condition, order_by=order, max_results=50_000)

    def nest(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Show a run below this one, which is open again, and give it these tags."""
        from mlflow.entities import RunTag

        if not self.is_open:
            self.client.update_run(self.run_id, status="RUNNING")
            self.is_open = True
        whole = {PARENT_TAG: self.run_id, **tags}
        self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in whole.items()])

    def end(self, status: str, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
        """End it, unless nothing has come since it was ended before."""
        from mlflow.entities import Metric, RunTag

        if not self.is_open:
            return
        now = int(1000 * time.time())
        self.client.log_batch(
            self.run_id,
            metrics=[Metric(name, value, now, 0) for name, value in metrics.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        self.client.set_terminated(self.run_id, status=status)
        self.is_open = False


def run_of(client: MlflowClient, rundir: RunDir, job_id: str) -> str | None:
    """Return the id of a job's run; None where there is none. Nodes name it, and may name another job's."""
    run_id = (rundir.read_json(TRACKING) or {}).get("mlflow_run_id")
    if not run_id or client.get_run(run_id).data.tags.get(JOB_TAG) != job_id:
        return None
    return str(run_id)


def write_to_run(
    client: MlflowClient,
    run_id: str,
    rundir: RunDir,
    *,
    metrics: Mapping[str, float],
    note: str = "",
) -> None:
    """Add to this run as `add_to_run` does, and what its run directory tells of its course. Raise as MLflow and the
    storage do."""
    from mlflow.entities import Metric, RunTag

    now, (figures, tags, curves) = int(1000 * time.time()), _course(rundir)
    client.log_batch(
        run_id,
        metrics=[Metric(name, value, now, 0) for name, value in {**figures, **metrics}.items()],
        tags=[RunTag(*tag) for tag in tags.items()],
    )
    if note:
        client.set_tag(run_id, NOTE_TAG, note)
    with scratch_folder("mlflow") as scratch:
        for name in _files_of(rundir):
            _write(scratch, name, rundir.storage.read(name))
        if curves:
            _write(scratch, FIGURES, json.dumps(curves, indent=1).encode())
        client.log_artifacts(run_id, str(scratch))


def _course(rundir: RunDir) -> tuple[dict[str, float], dict[str, str], dict[str, Any]]:
    """Return what a run directory tells of a training's course: as metrics the nodes that it lost and the step of its
    best weights, as tags its nodes, and its curves in short. What comes after a file that nodes have damaged is left
    out: whoever reads it for more says so."""
    figures, tags, curves = dict[str, float](), dict[str, str](), dict[str, Any]()
    with suppress(DamagedError):
        launch = rundir.read_json(LAUNCH) or {}
        tags = {tag: str(launch[name]) for tag, name in (("nodes", "node_count"), ("sku", "sku")) if launch.get(name)}
        if launch and (best := (rundir.read_json(RESULT) or {}).get("best_step")):
            figures["valid/best_step"] = float(best)
        events = list(rundir.events())
        curves = summarise(events)
        if launch:
            formed = {item.generation: item for item in read_events(MembershipEvent, events) if not item.was_asked}
            figures["lost/nodes"] = float(sum(len(item.lost) for item in formed.values()))
    return figures, tags, curves


def _files_of(rundir: RunDir) -> list[str]:
    """Return the files of a run directory that a person looks for: the job, its results and its reports."""
    found = [name for name in (JOB, RESULT, EVALUATION) if rundir.storage.exists(name)]
    return [*found, *(f"{REPORTS}/{name}" for name in rundir.storage.list(REPORTS))]


def _write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def cost_metrics(figures: Mapping[str, Any], lost_node_seconds: float | None = None) -> dict[str, float]:
    """Return those figures of a bill that people compare, as the metadata of `cost_breakdown` names them, as metrics;
    ``reports/cost_breakdown.json`` has the others. ``lost_node_seconds``: of the ledger, what went to failures; None
    where it is not known. Pure."""
    names = ("total_usd", "estimated_usd", "node_hours")
    usable = {f"cost/{name}": float(figures[name]) for name in names if isinstance(figures.get(name), int | float)}
    return usable | ({} if lost_node_seconds is None else {"lost/node_seconds": lost_node_seconds})


def note_of(verdict: str, worth: str | None, run_dir: str, run_url: str = "") -> str:
    """Return the description of an ended training, as MLflow's page shows it, in Markdown. Pure."""
    lines = [f"**{verdict}**" if verdict else "", worth or ""]
    lines += [f"[The run in Dagster]({run_url})" if run_url else "", f"Run directory: `{run_dir}`"]
    return "\n\n".join(line for line in lines if line)

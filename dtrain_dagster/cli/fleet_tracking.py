"""A fleet in MLflow: a run for the fleet, and one nested in it for each of its jobs.

The nodes of a job write its run while they train, as those of `dtrain train` do. What they do not know is added here:
the run above it, how the job has ended, and what it has cost. This is done on a thread of its own, since MLflow takes
seconds to import and to write, and a fleet decides in every second.

All that was written is found again by the tags of the runs. So another process that goes on with the fleet adds what is
missing, and makes no second run of a job.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dtrain_dagster.cli.tracking import Bill, describe_end, track
from dtrain_dagster.costs.money import usd
from dtrain_dagster.fleet.jobs import FleetState
from dtrain_dagster.registry.client import open_client
from dtrain_dagster.registry.run_record import PARENT_TAG, is_workspace, note_of, parent_run, run_of, write_to_run
from dtrain_dagster.support.formatting import dollars
from trainer.errors import DamagedError
from trainer.observability.mlflow_sink import NOTE_TAG, TRACKING, begin_run, ensure_experiment, figures_of_test
from trainer.observability.mlflow_sqlite import authorised
from trainer.rundir import EVALUATION, JOB, RunDir
from trainer.secrets.redaction import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from dtrain_dagster.cli.fleet_orders import ExpectedJob
    from dtrain_dagster.fleet.jobs import FleetLimits
    from dtrain_dagster.fleet.records import Entry, FleetRecords
    from dtrain_dagster.fleet.spec import FleetFile
    from dtrain_dagster.resources import GPUClusterResource, ProjectResource
    from dtrain_dagster.settings.environment import Settings
    from dtrain_dagster.settings.tiers import Tier
    from trainer.config import JobConfig

FLEET_TAG, RECORD_TAG = "dtrain.fleet", "dtrain.fleet_record"
"""Tags: of a job's run the name of its fleet; of a fleet's run also a digest of where its record is, since fleets of
other homes may have the same name."""
STATE_TAG, REASON_TAG = "state", "reason"
"""Tags of a job's run, as of a trial's: how it has ended in the fleet, and why."""
STATUS_OF = {FleetState.SUCCEEDED: "FINISHED", FleetState.FAILED: "FAILED", FleetState.ENDED: "KILLED"}
FAILURES_IN_A_ROW = 3
"""Jobs in a row that could not be written, after which the others are left for later."""
PATIENCE_SECONDS = 60.0
"""Seconds until these are tried again."""


def tracked_jobs(
    fleet: FleetFile, expected: Sequence[ExpectedJob], settings: Settings, cluster: GPUClusterResource,
    project: ProjectResource,
) -> list[ExpectedJob]:  # fmt: skip
    """Return the jobs of a fleet's file, tracked as `dtrain train` tracks a training; ``set`` of a job may switch it
    off."""
    found = []
    for entry, item in zip(fleet.jobs, expected, strict=True):
        order = item.job.order
        assert order is not None
        source = "dtrain fleet" if entry.script is None else os.path.basename(entry.script)
        asked = [f"{name}=" for name in entry.set]
        tracked = track(order.job, asked, settings, cluster, project, source, {FLEET_TAG: fleet.name})
        found.append(replace(item, job=replace(item.job, order=replace(order, job=tracked.job))))
    return found


class FleetTracker:
    """Writes one fleet to MLflow while it is run.

    ``told`` is called with a sentence for each thing that a person should know, from the thread that writes. Tracking
    that fails fails no fleet: what is missing is written when MLflow answers, at the latest by who goes on with it.
    """

    def __init__(
        self,
        records: FleetRecords,
        tier: Tier,
        told: Callable[[str], object],
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._records, self._tier, self._told, self._patience = records, tier, told, patience_seconds
        self._limits: FleetLimits = records.limits()
        self._entries: Sequence[Entry] = ()
        self._is_over = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._places: dict[tuple[str, str], _Place] = {}
        self._said: set[str] = set()
        self._where: list[str] = []

    def update(self, entries: Sequence[Entry]) -> None:
        """Take the state of all jobs, and return at once. Those of which none is tracked load no MLflow."""
        with self._wake:
            self._entries = tuple(entry for entry in entries if _place_of(entry) is not None)
            if self._thread is None and self._entries:
                self._thread = threading.Thread(target=self._work, name="fleet-tracking", daemon=True)
                self._thread.start()

    def finish(self) -> Sequence[str]:
        """Write what is left of a fleet that is over, wait for it, and return where its runs are, in sentences."""
        with self._wake:
            self._is_over = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        return self._where

    def _work(self) -> None:
        tried_at, is_over, goes_well = -self._patience, False, True
        while not is_over:
            with self._wake:
                self._wake.wait_for(lambda: self._is_over, timeout=1.0)
                entries, is_over = self._entries, self._is_over
            if goes_well or is_over or time.monotonic() - tried_at > self._patience:
                tried_at, goes_well = time.monotonic(), self._try_all(entries, is_over)

    def _try_all(self, entries: Sequence[Entry], is_over: bool) -> bool:
        """Write what has changed since, and return whether MLflow takes it."""
        of_places: dict[tuple[str, str], list[Entry]] = {}
        for entry in entries:
            if (key := _place_of(entry)) is not None:
                of_places.setdefault(key, []).append(entry)
        answers = [self._try(key, mine, is_over) for key, mine in of_places.items()]
        return all(answers)

    def _try(self, key: tuple[str, str], entries: Sequence[Entry], is_over: bool) -> bool:
        try:
            place = self._places.get(key) or self._open(*key)
            self._places[key] = place
            if place.client is None:
                return True
            problems = place.write(entries, self._tier)
            if is_over:
                place.finish(entries, self._limits, self._records.is_cancelled())
                self._where.append(f"in MLflow: experiment {key[1]}, run {self._records.name} (`dtrain ui mlflow`)")
        except _errors() as error:
            problems = [str(error)]
        for problem in problems:
            sentence = f"MLflow does not have all of fleet {self._records.name}: {redact(problem)}"
            if sentence not in self._said:
                self._said.add(sentence)
                self._told(sentence)
        return not problems

    def _open(self, tracking_uri: str, experiment: str) -> _Place:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # by default a dead server costs four minutes
        address, name = authorised(tracking_uri), self._records.name
        if is_workspace(address):  # has pages of its own for what is written here
            return _Place(client=None)
        client = open_client(address)
        experiment_id = ensure_experiment(client, experiment, address)
        mark = hashlib.sha256(self._records.storage.uri.encode()).hexdigest()[:16]
        parent = parent_run(client, experiment_id, name, RECORD_TAG, mark)
        client.set_tag(parent.info.run_id, FLEET_TAG, name)
        nested = client.search_runs(
            [experiment_id], f"tags.`{PARENT_TAG}` = '{parent.info.run_id}'", max_results=50_000
        )
        ended = {
            run.data.tags["job_id"]
            for run in nested
            if STATE_TAG in run.data.tags and run.info.status != "RUNNING" and "job_id" in run.data.tags
        }
        return _Place(
            client=client, address=address, fleet=name, parent_id=parent.info.run_id,
            is_open=parent.info.status == "RUNNING", ended=ended,
        )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class _Place:
    """An experiment of an MLflow in which jobs of a fleet are."""

    client: MlflowClient | None
    """None where nothing is written by the orchestrator."""
    address: str = ""
    fleet: str = ""
    parent_id: str = ""
    is_open: bool = False
    """Whether the run of the fleet is shown as running."""
    nested: set[str] = field(default_factory=set)
    """Jobs whose runs are below that of the fleet."""
    ended: set[str] = field(default_factory=set)
    """Jobs whose end is written."""

    def write(self, entries: Sequence[Entry], tier: Tier) -> list[str]:
        """Write what is new of these jobs, and return why that was impossible for some."""
        problems: list[str] = []
        in_a_row = 0
        for entry in entries:
            if entry.job.job_id in self.ended or not (entry.kept.state.is_final or entry.kept.launches):
                continue
            try:
                self._write(entry, tier)
                in_a_row = 0
            except _errors() as error:
                problems.append(f"{entry.job.job_id}: {error}")
                in_a_row += 1
                if in_a_row == FAILURES_IN_A_ROW:
                    break
        return problems

    def _write(self, entry: Entry, tier: Tier) -> None:
        assert self.client is not None
        if not self.is_open:
            self.client.update_run(self.parent_id, status="RUNNING")
            self.is_open = True
        job, job_id = _config_of(entry), entry.job.job_id
        if not entry.kept.state.is_final:
            if job_id not in self.nested and (run_id := run_of(self.client, RunDir(job.run_dir), job_id)) is not None:
                self._nest(run_id)
                self.nested.add(job_id)
            return
        self._write_end(entry, job, tier)
        self.ended.add(job_id)

    def _nest(self, run_id: str, more: Mapping[str, str] | None = None) -> None:
        from mlflow.entities import RunTag

        assert self.client is not None
        tags = {PARENT_TAG: self.parent_id, FLEET_TAG: self.fleet, **(more or {})}
        self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _write_end(self, entry: Entry, job: JobConfig, tier: Tier) -> None:
        """Write how a job has ended. The run's status comes last: by it another process sees that all is there."""
        assert self.client is not None
        kept, rundir = entry.kept, RunDir(job.run_dir)
        verdict = f"{kept.state}: {kept.reason}" if kept.reason else str(kept.state)
        was_begun, note = rundir.storage.exists(JOB), note_of(verdict, None, job.run_dir)
        metrics: dict[str, float] = {}
        if was_begun:
            bill = Bill(usd=usd(kept.paid_units), node_hours=kept.node_seconds / 3600)
            metrics = bill.metrics()
            with suppress(DamagedError):  # nodes write these files, and the end is told without them
                metrics, note = describe_end(rundir, tier, bill, verdict)
        run_id = run_of(self.client, rundir, entry.job.job_id)
        if run_id is None:  # it was never begun, or its nodes did not come as far as MLflow
            run_id = begin_run(self.client, self.address, job)
            if was_begun:
                rundir.write_json(TRACKING, {"mlflow_run_id": run_id})
                with suppress(DamagedError):
                    metrics |= figures_of_test(rundir.read_json(EVALUATION) or {})
        write_to_run(self.client, run_id, rundir, metrics=metrics, note=note)
        why = {REASON_TAG: redact(kept.reason)} if kept.reason else {}
        self._nest(run_id, {STATE_TAG: str(kept.state), **why})
        status = STATUS_OF[kept.state]
        if self.client.get_run(run_id).info.status != status:  # else its nodes have said when it ended
            self.client.set_terminated(run_id, status=status)

    def finish(self, entries: Sequence[Entry], limits: FleetLimits, is_cancelled: bool) -> None:
        """Write what all jobs have cost and how many have succeeded, and end the run of the fleet."""
        from mlflow.entities import Metric

        assert self.client is not None
        if not self.is_open:
            return  # nothing has come since it was written
        counts = Counter(entry.kept.state for entry in entries)
        paid = usd(sum(entry.kept.paid_units for entry in entries))
        figures = {
            "cost/total_usd": paid,
            "cost/node_hours": sum(entry.kept.node_seconds for entry in entries) / 3600,
            "cost/budget_usd": limits.budget_usd,
            **{f"jobs/{state}": counts[state] for state in STATUS_OF},
        }
        now = int(1000 * time.time())
        self.client.log_batch(self.parent_id, metrics=[Metric(name, value, now, 0) for name, value in figures.items()])
        done = f"{counts[FleetState.SUCCEEDED]} of {len(entries)} jobs succeeded"
        note = f"**{done}**, for {dollars(paid)} of {dollars(limits.budget_usd)}"
        self.client.set_tag(self.parent_id, NOTE_TAG, note)
        succeeded = counts[FleetState.SUCCEEDED] == len(entries)
        status = "FINISHED" if succeeded else "KILLED" if is_cancelled else "FAILED"
        self.client.set_terminated(self.parent_id, status=status)
        self.is_open = False


def _errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    return (MlflowException, OSError, ValueError, RuntimeError)


def _config_of(entry: Entry) -> JobConfig:
    assert entry.job.order is not None
    return entry.job.order.job


def _place_of(entry: Entry) -> tuple[str, str] | None:
    """Return the address and the experiment of a job; None for one that is not tracked."""
    tracking = _config_of(entry).tracking
    if tracking.mlflow_tracking_uri is None:
        return None
    return tracking.mlflow_tracking_uri, tracking.mlflow_experiment

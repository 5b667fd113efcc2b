"""What the command line writes to MLflow. Of a training: where its nodes write to, what is added once it has ended, and
its model, where that is to be registered. Of a fleet: a run of its own, in which the runs of its jobs are nested.

The nodes of a fleet's job write its run while they train, as those of `dtrain train` do. What they do not know is added
once the fleet is over: the run above it, how the job has ended, and what it has cost.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain_dagster.cli.common import TROUBLE, Refusal, run_dir, say
from dtrain_dagster.cli.facts import price_of_cluster
from dtrain_dagster.costs.ledger import ledger
from dtrain_dagster.costs.money import usd
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.timeline import CostCause
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.dashboard.page import write_report
from dtrain_dagster.fleet.jobs import FleetLimits, FleetState, Standing
from dtrain_dagster.jobs.orders import source_tags
from dtrain_dagster.jobs.progress import REGISTRATION
from dtrain_dagster.jobs.start import code_version
from dtrain_dagster.jobs.totals import cost_of
from dtrain_dagster.registry.run_record import (
    RunGroup,
    add_to_run,
    cost_metrics,
    is_workspace,
    note_of,
    run_of,
    write_to_run,
)
from dtrain_dagster.settings.cluster_kinds import Tier, tier_of
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars
from trainer.config import JOB_ID, JobConfig, TrackingConfig
from trainer.errors import DamagedError
from trainer.observability.mlflow_sink import NOTE_TAG
from trainer.observability.mlflow_sqlite import authorised
from trainer.rundir import EVALUATION, JOB, LAUNCH, RESULT, RunDir
from trainer.runtime.launch import with_order
from trainer.secrets.redaction import redact

if TYPE_CHECKING:
    from dtrain_dagster.configuration import ClusterConfiguration, ProjectConfiguration
    from dtrain_dagster.fleet.records import FleetRecords

FLEET_TAG, RECORD_TAG = "dtrain.fleet", "dtrain.fleet_record"
"""Tags: of a job's run the name of its fleet; of a fleet's run also a digest of where its record is, since fleets of
other homes may have the same name."""
STATE_TAG, REASON_TAG = "state", "reason"
"""Tags of a job's run, as of a trial's: how it has ended in the fleet, and why."""
STATUS_OF = {FleetState.SUCCEEDED: "FINISHED", FleetState.FAILED: "FAILED", FleetState.ENDED: "KILLED"}


MOST_FAILURES = 3
"""Jobs that could not be written, after which the others are left for who does it again: each waits for a server that
is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracked:
    """A job as it is written to MLflow from this start on."""

    job: JobConfig
    is_on: bool
    """Whether this start of it is."""

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of its nodes: ``job.json`` stays as it was begun, so a launch says that it is not
        tracked."""
        return {} if self.is_on else with_order({}, is_tracked=False)


def track(
    job: JobConfig,
    asked: Collection[str],
    settings: Settings,
    cluster: ClusterConfiguration,
    project: ProjectConfiguration,
    entry: str = "dtrain train",
    more: Mapping[str, str] | None = None,
) -> Tracked:
    """Return how a training is tracked. A new one is in the MLflow of the settings, or where it says itself; one that
    goes on is in the run in which it began. ``asked``: the overrides, which may switch it off, as the settings do;
    ``entry``: what MLflow names as its source; ``more``: tags of its run besides those that say where it comes from."""
    is_new = not run_dir(settings, job.job_id).storage.exists("job.json")
    is_stated = any(item.startswith(("tracking=", "tracking.mlflow_tracking_uri=")) for item in asked)
    is_off = job.tracking.mlflow_tracking_uri is None and (is_stated or settings.command_tracking == "off")
    if not is_new:
        job = as_tracked_before(job, run_dir(settings, job.job_id))
    elif job.tracking.mlflow_tracking_uri is None and not is_off:
        source, stated = {} if project.tracks_in_workspace else _source(entry, Path.cwd()), job.tracking
        has_own_name = stated.mlflow_experiment != TrackingConfig().mlflow_experiment
        tracking = replace(
            stated,
            mlflow_tracking_uri=cluster.registry(project).tracking_uri,
            mlflow_experiment=stated.mlflow_experiment if has_own_name else project.experiment,
            mlflow_run_name=stated.mlflow_run_name or job.job_id,
            tags={**source, **(more or {}), "code_version": code_version(), **stated.tags},
        )
        job = replace(job, tracking=tracking)
    return Tracked(job=job, is_on=not is_off and job.tracking.mlflow_tracking_uri is not None)


@cache
def _source(entry: str, folder: Path) -> dict[str, str]:
    """Return where a training comes from. A command asks git once, however many trainings it starts."""
    return source_tags(entry, folder)


def as_tracked_before(job: JobConfig, rundir: RunDir) -> JobConfig:
    """Return a job that does not say where it is tracked with the tracking of its earlier start, so that it goes on in
    the same run. What else it says of tracking stays, and has to be what it was."""
    if job.tracking.mlflow_tracking_uri is not None:
        return job
    before, usual = rundir.read_job().tracking, TrackingConfig()
    stated = {
        item.name: getattr(job.tracking, item.name)
        for item in fields(TrackingConfig)
        if item.name != "tags" and getattr(job.tracking, item.name) != getattr(usual, item.name)
    }
    return replace(job, tracking=replace(before, **stated, tags={**before.tags, **job.tracking.tags}))


def try_to_record_end(
    settings: Settings, cluster: ClusterConfiguration, project: ProjectConfiguration, tracked: Tracked, rundir: RunDir
) -> None:
    """Add dollars, report and description to the run of a training that has ended, and say where the run is, or why
    that was impossible: the job's own end is what counts."""
    job, tier, metrics, paid_usd = tracked.job, tier_of(settings.tiers[0]), dict[str, float](), None
    if not tracked.is_on or job.tracking.mlflow_tracking_uri is None:
        return
    try:
        try:
            tracker = CostTracker(settings.cluster_name, cluster.manager().node_usage(job.job_id), tier)
            lost, paid_usd = ledger(tracker.nodes, rundir.events()).causes().get(CostCause.LOST), tracker.total_usd
            figures = {"total_usd": paid_usd, "node_hours": tracker.node_hours}
            metrics = cost_metrics(figures, lost.seconds if lost else 0.0)
        except PriceError as error:
            say(f"the cost of {job.job_id} is not known: {error}", err=True)
        note = describe_end(rundir, tier, paid_usd, (rundir.read_json(RESULT) or {}).get("status", ""))
        why = add_to_run(job.tracking.mlflow_tracking_uri, rundir, job.job_id, metrics=metrics, note=note)
    except TROUBLE as error:
        why = f"MLflow does not have all of {job.job_id}: {redact(str(error))}"
    say(
        why or f"in MLflow: experiment {job.tracking.mlflow_experiment}, run {job.job_id} (`dtrain ui mlflow`)",
        err=True,
    )


def describe_end(rundir: RunDir, tier: Tier, paid_usd: float | None, verdict: str) -> str:
    """Return the description of a training that has ended, and write its report. ``verdict``: how it ended. Raise as
    the run directory does where it cannot be read."""
    evaluation = rundir.read_json(EVALUATION)
    write_report(rundir, tier)
    return note_of(verdict, worth_line(evaluation, paid_usd) if evaluation else None, rundir.uri)


def refuse_unregistrable(cluster: ClusterConfiguration, project: ProjectConfiguration, job: JobConfig) -> None:
    """Raise `Refusal` where a model that is to be registered could not be, before any node is asked for."""
    name = job.tracking.registered_model
    if name is None:
        return
    if job.dataset.factory is not None:
        raise Refusal(
            f"tracking.registered_model = {name!r}: the model of a dataset that a function makes is not registered: "
            "let a script call Trainer(…, registry=…).fit(…) with these datasets"
        )
    from dtrain_dagster.registry.versions import RegistryError  # not above: MLflow

    try:
        cluster.registry(project).try_out(name, job.tracking.mlflow_experiment)
    except RegistryError as error:
        raise Refusal(str(error)) from None


def unregistered_job(settings: Settings, name: str | None) -> JobConfig | None:
    """Return the job of this name if it has succeeded, was to be registered, and is not: nobody followed it, or MLflow
    could not be reached then."""
    if not name or not JOB_ID.fullmatch(name):
        return None
    rundir = run_dir(settings, name)
    if not rundir.storage.exists(JOB) or rundir.storage.exists(REGISTRATION):
        return None
    job, result = rundir.read_job(), rundir.read_json(RESULT) or {}
    return job if job.tracking.registered_model is not None and result.get("status") == "succeeded" else None


def try_to_register(
    settings: Settings,
    cluster: ClusterConfiguration,
    project: ProjectConfiguration,
    job: JobConfig,
    rundir: RunDir,
) -> bool:
    """Register the model of a training that has succeeded, as the assets do; say under which version and alias, or why
    it is not. Return whether it is, or was not to be."""
    name = job.tracking.registered_model
    if name is None:
        return True
    from dtrain_dagster.registry.registration import provenance_of, register_job  # not above: MLflow

    usage = cluster.manager().node_usage(job.job_id)
    nodes = int((rundir.read_json(LAUNCH) or {}).get("node_count", 1))
    made = provenance_of(rundir, usage, nodes, cost_of(usage, tier_of(settings.tiers[0]), price_of_cluster(settings)))
    try:
        found = register_job(
            cluster.registry(project),
            str(settings.home),
            rundir.uri,
            name,
            made,
            experiment=job.tracking.mlflow_experiment,
            cache_dir=project.cache_dir,
        )
    except TROUBLE as error:
        say(f"the model is not registered: {redact(str(error))}", err=True)
        say(f"once that is mended: dtrain train --name {job.job_id}", err=True)
        return False
    say(f"registered: {found.model.name} version {found.model.version}, alias {found.decision.alias}", err=True)
    say(f"  {found.decision.reason}", err=True)
    return True


def record_fleet(records: FleetRecords, jobs: Sequence[Standing], tier: Tier) -> list[str]:
    """Write a fleet that is over, and return where its runs are, and what MLflow does not have, in sentences. Jobs of
    which none is tracked load no MLflow; whoever does the same again adds what is missing."""
    said: list[str] = []
    places = dict.fromkeys(filter(None, map(_place_of, jobs)))
    if not places:
        return said
    from mlflow.exceptions import MlflowException

    errors = (MlflowException, *TROUBLE)
    for uri, experiment in places:
        mine = [item for item in jobs if _place_of(item) == (uri, experiment)]
        try:
            address = authorised(uri)
            if is_workspace(address):  # which has pages of its own for what is written
                continue
            mark = hashlib.sha256(records.storage.uri.encode()).hexdigest()[:16]
            group = RunGroup(address, experiment, records.name, (RECORD_TAG, mark), "job_id")
            group.client.set_tag(group.run_id, FLEET_TAG, records.name)
            written = {name for name, run in group.nested.items() if STATE_TAG in run.data.tags}
            problems = 0
            for item in mine:
                if not item.state.is_final or item.job_id in written or problems == MOST_FAILURES:
                    continue
                try:
                    _write_end(group, item, tier)
                except errors as error:  # such as of a run that somebody has deleted: it hides no other job
                    problems += 1
                    said.append(f"MLflow does not have all of {item.job_id}: {redact(str(error))}")
            _end_group(group, mine, records.limits(), records.is_cancelled())
            said.append(f"in MLflow: experiment {experiment}, run {records.name} (`dtrain ui mlflow`)")
        except errors as error:
            said.append(f"MLflow does not have all of fleet {records.name}: {redact(str(error))}")
    return said


def _write_end(group: RunGroup, ended: Standing, tier: Tier) -> None:
    """Write how a job has ended to the run that its nodes began; one without a run had never begun, or did not come as
    far as MLflow."""
    rundir, client = ended.job.rundir, group.client
    run_id = run_of(client, rundir, ended.job_id)
    if run_id is None:
        return
    verdict = f"{ended.state}: {ended.reason}" if ended.reason else str(ended.state)
    note = note_of(verdict, None, rundir.uri)
    with suppress(DamagedError):  # nodes write these files, and the end is told without them
        note = describe_end(rundir, tier, ended.usd, verdict)
    metrics = cost_metrics({"total_usd": ended.usd, "node_hours": ended.node_seconds / 3600})
    write_to_run(client, run_id, rundir, metrics=metrics, note=note)
    status = STATUS_OF[ended.state]
    if client.get_run(run_id).info.status != status:  # else its nodes have said when it ended
        client.set_terminated(run_id, status=status)
    group.nest(run_id, {STATE_TAG: str(ended.state), REASON_TAG: redact(ended.reason)})  # last: then all is there


def _end_group(group: RunGroup, jobs: Sequence[Standing], limits: FleetLimits, is_cancelled: bool) -> None:
    """Write what all jobs have cost and how many have succeeded, and end the run of the fleet."""
    counts = Counter(item.state for item in jobs)
    paid = usd(sum(item.paid_units for item in jobs))
    metrics = {
        "cost/total_usd": paid,
        "cost/node_hours": sum(item.node_seconds for item in jobs) / 3600,
        "cost/budget_usd": limits.budget_usd,
        **{f"jobs/{state}": float(counts[state]) for state in STATUS_OF},
    }
    done = f"{counts[FleetState.SUCCEEDED]} of {len(jobs)} jobs succeeded"
    note = f"**{done}**, for {dollars(paid)} of {dollars(limits.budget_usd)}"
    succeeded = counts[FleetState.SUCCEEDED] == len(jobs)
    group.end("FINISHED" if succeeded else "KILLED" if is_cancelled else "FAILED", metrics, {NOTE_TAG: note})


def _place_of(standing: Standing) -> tuple[str, str] | None:
    """Return the address and the experiment of a job; None for one that is not tracked, or cannot be a training."""
    config = standing.job.config
    if config is None or config.tracking.mlflow_tracking_uri is None:
        return None
    return config.tracking.mlflow_tracking_uri, config.tracking.mlflow_experiment

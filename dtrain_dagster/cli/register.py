"""What `dtrain train` does for a model that is to be registered, once its training has ended well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtrain_dagster.cli.common import Refusal, run_dir, say
from dtrain_dagster.cli.facts import price_of_cluster
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.jobs.progress import REGISTRATION, code_version
from dtrain_dagster.jobs.totals import read_phase_totals, sum_launches
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.tiers import tier_of
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.secrets import redact
from trainer.config import JOB_ID, JobConfig
from trainer.rundir import JOB, LAUNCH, RESULT, RunDir

if TYPE_CHECKING:  # Dagster: most commands answer without it
    from dtrain_dagster.resources import GPUClusterResource, ProjectResource


def refuse_unregistrable(cluster: GPUClusterResource, project: ProjectResource, job: JobConfig) -> None:
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
    cluster: GPUClusterResource,
    project: ProjectResource,
    job: JobConfig,
    rundir: RunDir,
) -> bool:
    """Register the model of a training that has succeeded, as the assets do; say under which version and alias, or why
    it is not. Return whether it is, or was not to be."""
    name = job.tracking.registered_model
    if name is None:
        return True
    from dtrain_dagster.registry.registration import register_job  # not above: MLflow
    from dtrain_dagster.registry.versions import TrainingProvenance

    tier = tier_of(settings.tiers[0])
    usage = cluster.manager().node_usage(job.job_id)
    took, sku = sum_launches(usage), ", ".join(sorted({interval.sku for interval in usage}))
    try:
        total: float | None = CostTracker(settings.cluster_name, usage, tier).total_usd
        in_words = f"{dollars(total or 0.0)} ({sku}: {price_of_cluster(settings)})"
    except PriceError as error:
        total, in_words = None, f"cost not known: {error}"
    made = TrainingProvenance(
        nodes=int((rundir.read_json(LAUNCH) or {}).get("node_count", 1)),
        node_hours=took.node_hours,
        launches=max(1, took.launches),
        train_seconds=read_phase_totals(rundir, rundir.events()).get("training"),
        cost_usd=in_words,
        cost_usd_total=total,
        sku=sku,
        code_version=code_version(),
        dagster_run_id="",
    )
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
    except (ValueError, RuntimeError, OSError) as error:
        say(f"the model is not registered: {redact(str(error))}", err=True)
        say(f"once that is mended: dtrain train --name {job.job_id}", err=True)
        return False
    say(f"registered: {found.model.name} version {found.model.version}, alias {found.decision.alias}", err=True)
    say(f"  {found.decision.reason}", err=True)
    return True

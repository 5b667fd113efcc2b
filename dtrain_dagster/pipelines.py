"""Training graphs for any code location: `build_training_assets` gives one under a name, as often as it is called.

The graph of the stock prices (`dtrain_dagster.definitions`) is built of the same parts. What an asset does belongs in
`dtrain_dagster.assets`. No heavy import happens here, and no I/O but for the code version of assets.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import dagster as dg

from dtrain_dagster.assets import (
    checks,
    costs,
    dataset,
    planning,
    program,
    registry,
    reporting,
    search,
    training,
)
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.plan_options import PlanOptions, ScriptOptions, TrainingOptions
from dtrain_dagster.automation.retraining import TRAIN_JOB
from dtrain_dagster.jobs.program import explain_refusal
from dtrain_dagster.resources import ProjectResource, build_resources
from dtrain_dagster.sensors.cost_overrun import build_ceilings_sensor, build_cost_overrun_sensor
from dtrain_dagster.sensors.idle_cluster import build_idle_cluster_sensor
from dtrain_dagster.sensors.orphans import build_orphan_sensor
from dtrain_dagster.sensors.queue import build_queue_sensor
from dtrain_dagster.sensors.retraining import (
    build_new_data_sensor,
    build_retraining_failed_sensor,
    build_staleness_sensor,
    build_weekly_schedule,
)
from dtrain_dagster.settings.environment import Settings, load_settings
from dtrain_dagster.support.graph_names import GraphNames, checked_names
from trainer.config import DistributedTrainingConfig
from trainer.setting_errors import explain_unknown

OF_SCRIPT = (
    "the model of a script is registered with registry=True (in YAML, registry: true). Its weights are in the run "
    "directory, model/weights.pt"
)


class PipelineError(ValueError):
    """An argument of a pipeline that cannot be used. The message names the pipeline, the argument and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices(dg.Resolvable):
    """Prices to train on, as the launchpads of `stock_prices` and `sharded_dataset` have them. What is None begins as
    it does there."""

    source: str | None = None
    """sp500_panel, or the address of a file; None: DTRAIN_PRICES."""
    window: int | None = None
    horizon: int | None = None
    train_last: str | None = None
    valid_last: str | None = None
    shards: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(dg.Resolvable):
    """The cluster that trains. What is None is as the environment has it (``DTRAIN_CLUSTER`` and its like)."""

    kind: str | None = None
    """local, azure_ml, slurm, kubernetes or ray."""
    name: str | None = None
    nodes: int | None = None
    processes_per_node: int | None = None
    threads_per_rank: int | None = None
    gpu_type: str | None = None
    tier: str | None = None

    def settings(self, **own: Any) -> Settings:
        """Return the environment's settings with these and ``own`` in their place. Raise `SettingsError` for what
        cannot be used."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        renamed = {{"kind": "cluster", "name": "cluster_name"}.get(name, name): value for name, value in given.items()}
        return load_settings(**renamed, **own)


def build_training_assets(
    name: str,
    dataset: "Prices | str | os.PathLike[str] | dg.AssetKey | dg.AssetsDefinition | dg.AssetSpec | None" = None,
    *,
    script: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
    registry: bool = False,
    model: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    loss: str | None = None,
    loss_args: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    model_name: str | None = None,
    experiment: str | None = None,
    schedule: str | None = None,
    owners: Sequence[str] = (),
    deps: "Sequence[dg.AssetKey]" = (),
) -> "dg.Definitions":
    """Return a whole training graph whose assets have the key prefix ``name``, with its checks, job, schedule, sensors
    and resources. Several of them, and a team's own definitions, go together with `dagster.Definitions.merge`.

    ``dataset``: `Prices`; the folder or id of a dataset; or the asset of this code location that returns such a folder.
    ``script``: instead, a script that calls `trainer.Trainer.fit`, with its ``arguments``; its model is registered with
    ``registry``, as that of a dataset always is. ``model``, ``loss``: stock names or ``package.module:factory``.
    ``training``: fields of `trainer.config.DistributedTrainingConfig`; ``limits``: budget_usd, deadline_hours,
    stop_at_usd, probe, nodes, gpu_type, tier. Launchpads begin with all of these. ``cluster``: as the environment has
    it, where None. ``model_name``, ``experiment``: in MLflow (None: ``name``). ``schedule``: cron of the retraining,
    switched off by default. ``owners``: of the assets. ``deps``: assets that are made before the first one of a graph
    without prices. Raise `PipelineError`, or `SettingsError` for an unusable environment.
    """
    if (dataset is None) == (script is None):
        raise PipelineError(f"pipeline {name}: give either dataset or script")
    given = {"model": model, "model_args": model_args, "loss": loss, "loss_args": loss_args}
    parts = {key: value for key, value in given.items() if value is not None}
    if registry and script is None:
        raise PipelineError(f"pipeline {name}: registry is for a script; the model of a dataset is always registered")
    if script is not None and parts:
        raise PipelineError(f"pipeline {name}: {', '.join(parts)} cannot be combined with script, which has its own")
    try:
        names = checked_names(name)
        settings = (cluster or Cluster()).settings(model_name=model_name or name, experiment=experiment or name)
        plan = _plan_options(TrainingOptions if script is None else ScriptOptions, parts, training, limits)
        defaults: dict[str, dict[str, Any]] = {"cost_estimate": plan}
        pipeline = Pipeline(
            names=names,
            cluster=settings.cluster_key,
            owners=tuple(owners),
            defaults=defaults,
            deps=tuple(map(dg.AssetKey.from_coercible, deps)),
            **_source(dataset, script, arguments, registry, defaults),
        )
        return build_graph(pipeline, settings, build_resources(settings, names), schedule)
    except ValueError as error:
        raise type(error)(f"pipeline {name}: {error}") from None


def build_program_asset(
    name: str,
    script: str | os.PathLike[str],
    *,
    engine: str = "torchrun",
    arguments: Sequence[str] = (),
    nodes: int | None = None,
    processes_per_node: int | None = None,
    cluster: Cluster | None = None,
    owners: Sequence[str] = (),
    deps: "Sequence[dg.AssetKey]" = (),
) -> "dg.Definitions":
    """Return the asset ``NAME/program_run`` of a script that trains by itself, under torchrun, Horovod, DeepSpeed, Ray
    Train or TensorFlow, with its job, sensors and resources. A script that calls `trainer.Trainer.fit` has more of
    `build_training_assets`.

    ``engine``, ``arguments``, ``nodes``, ``processes_per_node``: where the launchpad begins
    (`dtrain_dagster.assets.program.ProgramOptions`). ``cluster``: as the environment has it, where None. Raise
    `PipelineError` for what makes no sense, or `SettingsError` for an unusable environment.
    """
    given = {"engine": engine, "arguments": list(arguments), "nodes": nodes, "processes_per_node": processes_per_node}
    try:
        names = checked_names(name)
        if engine not in tuple(program.Engine):
            raise PipelineError(f"engine = {engine!r}: it must be one of {', '.join(program.Engine)}")
        path = _script_path(script)
        settings = (cluster or Cluster()).settings()
        resources = build_resources(settings, names)
        has_gpus = resources[names.cluster].have_gpus
        if why := explain_refusal(engine, settings.kind, processes_per_node or 1, has_gpus):
            raise PipelineError(why)
        pipeline = Pipeline(
            names=names,
            cluster=settings.cluster_key,
            owners=tuple(owners),
            defaults={program.PROGRAM: {key: value for key, value in given.items() if value is not None}},
            deps=tuple(map(dg.AssetKey.from_coercible, deps)),
            source="script",
            script=str(path),
        )
        asset = program.build_program_run(pipeline)
    except ValueError as error:
        raise type(error)(f"program {name}: {error}") from None
    job = dg.define_asset_job(
        names.unique("run"),
        selection=dg.AssetSelection.assets(asset.key),
        description=f"{path.name} on the cluster.",
        executor_def=dg.in_process_executor,
    )
    return dg.Definitions(
        assets=[asset, training.build_gpu_cluster(pipeline)],
        resources=resources,
        jobs=[job],
        sensors=build_sensors(settings, names, resources[names.project]),
    )


def _plan_options(
    kind: type[PlanOptions],
    parts: Mapping[str, Any],
    training: Mapping[str, Any] | None,
    limits: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return where the launchpad of `cost_estimate` begins. Raise ValueError for fields that there are not. Pure."""
    named, known = {item.name for item in fields(DistributedTrainingConfig)}, set(PlanOptions.model_fields) - {"more"}
    training, limits = training or {}, limits or {}
    for section, given, names in (("training", training, named), ("limits", limits, known)):
        if unknown := [name for name in given if name not in names]:
            raise ValueError("; ".join(explain_unknown(f"{section}.{name}", name, names) for name in unknown))
    shown = {name: value for name, value in training.items() if name in kind.model_fields}
    more = {name: value for name, value in training.items() if name not in shown}
    return {**parts, **shown, **({"more": more} if more else {}), **limits}


def _source(
    dataset: Any,
    script: str | os.PathLike[str] | None,
    arguments: Sequence[str],
    registry: bool,
    defaults: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return the fields of `Pipeline` that say what is trained on; ``defaults`` gets its launchpad's."""
    if script is not None:
        path = _script_path(script)
        if arguments:
            defaults["cost_estimate"]["arguments"] = list(arguments)
        return {"source": "script", "script": str(path), "unregistered": "" if registry else OF_SCRIPT}
    if isinstance(dataset, Prices):
        given = {name: value for name, value in asdict(dataset).items() if value is not None}
        source = {"source": given.pop("source")} if "source" in given else {}
        defaults |= {"stock_prices": source, "sharded_dataset": given}
        return {"source": "prices"}
    if isinstance(dataset, dg.AssetKey | dg.AssetsDefinition | dg.AssetSpec):
        return {"source": "asset", "upstream": dataset if isinstance(dataset, dg.AssetKey) else dataset.key}
    defaults["sharded_dataset"] = {"folder": os.fspath(dataset)}
    return {"source": "folder"}


def _script_path(script: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a script. Raise ValueError where there is none."""
    path = Path(script).expanduser().absolute()
    if not path.is_file():
        raise ValueError(f"script = {str(script)!r}: there is no file {path}")
    return path


def build_graph(
    pipeline: Pipeline, settings: Settings, resources: Mapping[str, Any], schedule: str | None = None
) -> dg.Definitions:
    """Return a graph's assets, checks, job, schedule and own sensors, with these resources. ``schedule``: cron of the
    retraining (None: Saturday at six)."""
    names, of_prices, of_script = pipeline.names, pipeline.source == "prices", pipeline.source == "script"
    assets: list[dg.AssetsDefinition] = []
    asset_checks: list[dg.AssetChecksDefinition] = [checks.build_estimate_scored(names)]
    if of_prices:
        assets += [dataset.build_stock_prices(pipeline), dataset.build_sharded_dataset(pipeline)]
    elif not of_script:
        assets.append(dataset.build_given_dataset(pipeline))
    assets += [planning.build_cost_estimate(pipeline), training.build_trained_checkpoint(pipeline)]
    if not pipeline.unregistered:
        assets.append(registry.build_registered_model(pipeline))
    if not of_script:
        asset_checks += [checks.build_leakage_checks(pipeline)]
    assets += [costs.build_cost_breakdown(pipeline), reporting.build_performance_report(pipeline)]
    train = dg.define_asset_job(
        names.unique(TRAIN_JOB),
        selection=dg.AssetSelection.assets(*(item.key for item in assets)),
        description="The whole graph except the studies: data, plan, training, registration, reports. In its "
        "launchpad, "
        "ops.cost_estimate.config has the settings of the training: model, epochs, nodes, limits.",
        # One process per run: a process per step would pay the imports of torch, mlflow and pandas seven times over.
        # The training itself runs in processes of its own, under a supervisor that outlives this one.
        executor_def=dg.in_process_executor,
    )
    automatic = [build_new_data_sensor(settings, names, pipeline.prices), build_staleness_sensor(settings, names)]
    return dg.Definitions(
        assets=[
            *assets,
            training.build_gpu_cluster(pipeline),
            *([] if of_script else [search.build_hyperparameter_search(pipeline)]),
        ],
        asset_checks=asset_checks,
        resources=resources,
        jobs=[train],
        schedules=[build_weekly_schedule(settings, names, schedule)],
        sensors=[*build_sensors(settings, names, resources[names.project]), *(automatic if of_prices else [])],
    )


def build_sensors(settings: Settings, names: GraphNames, project: ProjectResource) -> list[dg.SensorDefinition]:
    """Return the sensors that watch a graph's jobs and, for all graphs on it, the cluster."""
    return [
        build_idle_cluster_sensor(settings, names),
        build_cost_overrun_sensor(names),
        build_ceilings_sensor(names),
        build_retraining_failed_sensor(project, names),
        build_queue_sensor(settings, names),
        build_orphan_sensor(settings, names),
    ]

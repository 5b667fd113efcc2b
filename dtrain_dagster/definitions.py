"""The code location: assets, checks, jobs, schedules, sensors, resources. No I/O and no heavy import happens here."""

# ruff: noqa: E402
import gc
from collections.abc import Mapping

import dagster as dg

# Dagster's hundred thousand objects stay for as long as the process lives: the collections of garbage that our own
# imports and everything after them set off need not walk over them again. What is freed by counting references still
# is; a cycle among them that became garbage later would stay, and modules, classes and functions make none.
gc.freeze()

from dtrain_dagster.assets import (
    champion_check,
    costs,
    dataset,
    estimate_check,
    planning,
    registry,
    reporting,
    scaling,
    training,
)
from dtrain_dagster.automation.retraining import RETRAINING, ask, budget_words, weekly
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, build_resources
from dtrain_dagster.sensors.cost_overrun import build_cost_overrun_sensor
from dtrain_dagster.sensors.idle_cluster import build_idle_cluster_sensor
from dtrain_dagster.sensors.new_data import build_new_data_sensor
from dtrain_dagster.sensors.orphans import build_orphan_sensor
from dtrain_dagster.sensors.queue import build_queue_sensor
from dtrain_dagster.sensors.retraining_failed import build_retraining_failed_sensor
from dtrain_dagster.sensors.staleness import build_staleness_sensor
from dtrain_dagster.settings.environment import Settings, load_settings
from dtrain_dagster.settings.unknown import warn_of_unknown_variables

ASSETS: list[dg.AssetsDefinition | dg.AssetSpec] = [
    dataset.stock_prices,
    dataset.sharded_dataset,
    planning.cost_estimate,
    training.gpu_cluster,
    training.trained_checkpoint,
    registry.registered_model,
    costs.cost_breakdown,
    reporting.performance_report,
    scaling.scaling_study,
]


def build_defs(
    settings: Settings | None = None, resource_overrides: Mapping[str, dg.ConfigurableResource] | None = None
) -> dg.Definitions:
    """Return the code location. Raise `dtrain_dagster.settings.environment.SettingsError` for an unusable
    environment."""
    settings = settings or load_settings()
    warn_of_unknown_variables()
    retraining = dg.define_asset_job(
        RETRAINING,
        selection=dg.AssetSelection.all() - dg.AssetSelection.groups(scaling.GROUP),
        description="The whole graph but the studies: prices, shards, plan, training, registration, reports.",
    )
    return dg.Definitions(
        assets=ASSETS,
        asset_checks=[
            dataset.leakage_checks,
            estimate_check.estimate_scored,
            champion_check.champion_holds,
            *([registry.endpoint_compatible] if settings.endpoint else []),
        ],
        resources={**build_resources(settings), **(resource_overrides or {})},
        jobs=[retraining],
        schedules=[weekly_retraining(settings)],
        sensors=[
            build_idle_cluster_sensor(settings),
            build_cost_overrun_sensor(settings),
            build_new_data_sensor(settings, RETRAINING),
            build_staleness_sensor(settings, RETRAINING),
            build_retraining_failed_sensor(),
            build_queue_sensor(settings),
            build_orphan_sensor(settings),
        ],
        # One process per run: a process per step would pay the imports of torch, mlflow and pandas seven times over.
        # The training itself runs in processes of its own, under a supervisor that outlives this one.
        executor=dg.in_process_executor,
    )


def weekly_retraining(settings: Settings) -> dg.ScheduleDefinition:
    """Return the schedule, switched off by default, that asks for a weekly retraining."""

    @dg.schedule(
        name="weekly_retraining",
        job_name=RETRAINING,
        cron_schedule=settings.retrain_cron,
        execution_timezone=settings.retrain_timezone,
        default_status=dg.DefaultScheduleStatus.STOPPED,  # it spends money: a person switches it on
        description=(
            "Retrains on the latest prices once a week: DTRAIN_RETRAIN_CRON says when, in DTRAIN_RETRAIN_TIMEZONE. "
            "Left out where a training is under way. " + budget_words(settings.retrain_budget_usd)
        ),
    )
    def weekly_schedule(
        context: dg.ScheduleEvaluationContext, project: ProjectResource, cluster: GPUClusterResource
    ) -> dg.RunRequest | dg.SkipReason:
        cause = weekly(context.scheduled_execution_time)
        return ask(context, cause, project, cluster, settings.retrain_budget_usd)

    return weekly_schedule


defs = build_defs()

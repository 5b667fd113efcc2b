"""The schedule ``weekly_retraining``: it asks for a retraining on a clock."""

from __future__ import annotations

import dagster as dg

from dtrain_dagster.automation.retraining import TRAIN_JOB, ask, budget_words, weekly
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames


def weekly_retraining(
    settings: Settings, names: GraphNames = STOCK_NAMES, cron: str | None = None
) -> dg.ScheduleDefinition:
    """Return the schedule, switched off by default, that asks for a weekly retraining. ``cron``: five fields (None:
    DTRAIN_RETRAIN_CRON)."""

    @dg.schedule(
        name=names.unique("weekly_retraining"),
        job_name=names.unique(TRAIN_JOB),
        cron_schedule=cron or settings.retrain_cron,
        execution_timezone=settings.retrain_timezone,
        required_resource_keys=names.resources,
        default_status=dg.DefaultScheduleStatus.STOPPED,  # it spends money: a person switches it on
        description=(
            f"Retrains on the latest {'data' if names.pipeline else 'prices'} once a week: DTRAIN_RETRAIN_CRON says "
            "when, in DTRAIN_RETRAIN_TIMEZONE. "
            "Skipped while a training is under way. " + budget_words(settings.retrain_budget_usd)
        ),
    )
    def weekly_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        project, cluster = project_resource(context, names), cluster_resource(context, names)
        cause = weekly(context.scheduled_execution_time)
        return ask(context, cause, project, cluster, settings.retrain_budget_usd, names)

    return weekly_schedule

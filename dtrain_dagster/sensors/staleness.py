"""The sensor ``staleness``: it retrains when the champion has grown old, or is no longer good enough."""

from __future__ import annotations

import time

import dagster as dg

from dtrain_dagster.automation.retraining import (
    CHAMPION_CHECK,
    TRAIN_JOB,
    ask,
    budget_words,
    judgement,
    newest_prices,
    prices_of,
    registrations,
    staleness,
)
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames


def build_staleness_sensor(settings: Settings, names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor, switched off by default, that asks for a retraining when the champion is stale."""
    days = settings.retrain_max_age_days

    @dg.sensor(
        name=names.unique("staleness"),
        job_name=names.unique(TRAIN_JOB),
        required_resource_keys=names.resources,
        minimum_interval_seconds=600,
        default_status=dg.DefaultSensorStatus.STOPPED,  # retraining spends money: a person switches it on
        description=(
            f"Retrains when nothing was trained for {days:g} days, or when the newest prices end {days:g} days after "
            "those of the latest training (DTRAIN_RETRAIN_MAX_AGE_DAYS), or when a baseline forecasts the days since "
            f"better than the champion, beyond chance (check {CHAMPION_CHECK} of sharded_dataset). "
            + budget_words(settings.retrain_budget_usd)
        ),
    )
    def staleness_sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        project, cluster = project_resource(context, names), cluster_resource(context, names)
        champion, latest = registrations(context.instance, names)
        found = staleness(
            champion,
            latest,
            prices_of(project.shared_uri, latest.dataset_id) if latest and latest.dataset_id else None,
            newest_prices(context.instance, names),
            judgement(context.instance, names),
            time.time(),
            days,
        )
        if isinstance(found, str):
            return dg.SkipReason(found)
        why = []
        for cause in found:  # a cause that had its run does not hide the others
            asked = ask(context, cause, project, cluster, settings.retrain_budget_usd, names)
            if isinstance(asked, dg.RunRequest):
                return asked
            why.append(asked.skip_message or "")
        return dg.SkipReason("\n".join(why))

    return staleness_sensor

"""The sensor ``new_data``: it retrains when the project's price file has new content."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import dagster as dg

from dtrain_dagster.automation import clock
from dtrain_dagster.automation.retraining import (
    TRAIN_JOB,
    ask,
    at_clock,
    budget_words,
    new_data,
    prices_of,
    read_watch,
    seen,
    trained_dataset,
    unreadable,
)
from dtrain_dagster.resources import cluster_resource, project_resource
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log
from dtrain_dagster.support.secrets import redact


def build_new_data_sensor(
    settings: Settings, names: GraphNames = STOCK_NAMES, prices: str | None = None
) -> dg.SensorDefinition:
    """Return the sensor, switched off by default, that asks for a retraining when the prices have changed.
    ``prices``: where they come from (None: DTRAIN_PRICES)."""
    watched, whose = prices or settings.prices, "its prices" if prices else "DTRAIN_PRICES"

    @dg.sensor(
        name=names.unique("new_data"),
        job_name=names.unique(TRAIN_JOB),
        required_resource_keys=names.resources,
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,  # retraining spends money: a person switches it on
        description=(
            f"Retrains when the file of {whose} differs from what the latest training used, and has not changed for "
            f"{settings.retrain_debounce_minutes:g} minutes (DTRAIN_RETRAIN_DEBOUNCE_MINUTES). "
            + budget_words(settings.retrain_budget_usd)
        ),
    )
    def new_data_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        from dtrain_dagster.data.sources import PriceFile, price_source

        project, cluster = project_resource(context, names), cluster_resource(context, names)
        source = price_source(watched)
        if not isinstance(source, PriceFile):
            return dg.SensorResult(skip_reason=f"{watched!r} is not a file of your own: it is not watched")
        now, pause, watch = time.time(), settings.retrain_debounce_minutes * 60, read_watch(context.cursor)
        watch = at_clock(watch, clock.reading())

        def skip(why: str) -> dg.SensorResult:
            return dg.SensorResult(skip_reason=redact(why), cursor=json.dumps(asdict(watch)))

        try:
            watch = seen(watch, source.version(), now)
            if now - watch.since < pause:
                rest = format_duration(watch.since + pause - now)
                return skip(f"{watched} is read once it has not changed for another {rest}")
            if not watch.digest:
                digest = source.digest()
                if source.version() != watch.version:
                    return skip(f"{watched} was written while it was read")
                watch = replace(watch, digest=digest)
        except Exception as error:  # a file system's own errors, of any kind
            watch = unreadable(watch, now)
            problem = redact(f"{watched} cannot be read: {error or type(error).__name__}")
            if now - watch.unreadable_since >= pause and not watch.told:  # it may be about to be replaced
                context.log.warning(problem)
                remedy = "DTRAIN_PRICES names the file; once it can be read again, it is watched as before"
                notify_and_log(
                    project.notify_urls(), "dtrain: the prices cannot be read", f"{problem}\n{remedy}", context.log
                )
                watch = replace(watch, told=True)
            return skip(problem)
        watch = replace(watch, unreadable_since=0.0, told=False)
        dataset_id = trained_dataset(context.instance, names)
        trained_on = prices_of(project.shared_uri, dataset_id) if dataset_id else None
        if trained_on is None:
            return skip("nothing was trained yet that could be trained again: materialize the graph by hand first")
        if trained_on.sha256 == watch.digest:
            return skip(f"{watched} is what the latest training had")
        asked = ask(context, new_data(watch.digest), project, cluster, settings.retrain_budget_usd, names)
        if isinstance(asked, dg.SkipReason):
            return skip(asked.skip_message or "")
        return dg.SensorResult(run_requests=[asked], cursor=json.dumps(asdict(watch)))

    return new_data_sensor

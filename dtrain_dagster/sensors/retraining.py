"""What retrains by itself, each switched off by default: the schedule ``weekly_retraining`` and the sensors
``new_data`` and ``staleness``; and the sensor ``retraining_failed``, which reports a failed run that no person started
and so none watches."""

from __future__ import annotations

import json
import time
from typing import Any

import dagster as dg

from dtrain_dagster.automation.capacity_queue import WaitingList
from dtrain_dagster.automation.retraining import (
    CAUSE_TAG,
    DAY,
    STALE_DAYS,
    TRAIN_JOB,
    ask,
    budget_words,
    new_data,
    staleness,
    trained_prices,
    weekly,
)
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.notices import was_told
from dtrain_dagster.data.sources import PriceFile, price_source
from dtrain_dagster.jobs.progress import JOB_TAG
from dtrain_dagster.resources import ProjectResource, project_resource
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log
from dtrain_dagster.support.page_entries import read_entries
from dtrain_dagster.support.secrets import redact
from trainer.errors import DamagedError
from trainer.rundir import STATUS, RunDir

WEEKLY, TIMEZONE = "0 6 * * 6", "America/New_York"
"""Saturday at six, when the week's prices are there."""
QUIET_SECONDS = 600.0
"""How long a changed file has to stay unchanged: it may still be written."""


def build_weekly_schedule(
    settings: Settings, names: GraphNames = STOCK_NAMES, cron: str | None = None
) -> dg.ScheduleDefinition:
    """Return the schedule of a weekly retraining. ``cron``: five fields (None: `WEEKLY`)."""

    @dg.schedule(
        name=names.unique("weekly_retraining"),
        job_name=names.unique(TRAIN_JOB),
        cron_schedule=cron or WEEKLY,
        execution_timezone=TIMEZONE,
        required_resource_keys=names.resources,
        default_status=dg.DefaultScheduleStatus.STOPPED,  # it spends money: a person switches it on
        description=(
            f"Retrains on the latest {'data' if names.pipeline else 'prices'} once a week, by the time of New York. "
            "Skipped while a training is under way. " + budget_words(settings.retrain_budget_usd)
        ),
    )
    def weekly_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        return ask(context, weekly(context.scheduled_execution_time), settings.retrain_budget_usd, names)

    return weekly_schedule


def build_new_data_sensor(
    settings: Settings, names: GraphNames = STOCK_NAMES, prices: str | None = None
) -> dg.SensorDefinition:
    """Return the sensor that retrains on changed prices. ``prices``: where they are (None: DTRAIN_PRICES)."""
    watched, whose = prices or settings.prices, "its prices" if prices else "DTRAIN_PRICES"
    budget_usd = settings.retrain_budget_usd

    @dg.sensor(
        name=names.unique("new_data"),
        job_name=names.unique(TRAIN_JOB),
        required_resource_keys=names.resources,
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,  # retraining spends money: a person switches it on
        description=(
            f"Retrains when the file of {whose} differs from what the latest training used, and has not changed for "
            f"{format_duration(QUIET_SECONDS)}. " + budget_words(budget_usd)
        ),
    )
    def new_data_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        source = price_source(watched)
        if not isinstance(source, PriceFile):
            return dg.SensorResult(skip_reason=f"{watched!r} is not a file of your own: it is not watched")
        known, why = look(source, json.loads(context.cursor or "{}"), time.time())
        trained_on = trained_prices(context.instance, project_resource(context, names).shared_uri, names)
        if not why and trained_on is None:
            why = "nothing was trained yet that could be trained again: materialize the graph by hand first"
        elif not why and trained_on == known["digest"]:
            why = f"{watched} is what the latest training had"
        asked = dg.SkipReason(redact(why)) if why else ask(context, new_data(known["digest"]), budget_usd, names)
        return dg.SensorResult(
            run_requests=[asked] if isinstance(asked, dg.RunRequest) else [],
            skip_reason=asked if isinstance(asked, dg.SkipReason) else None,
            cursor=json.dumps(known),
        )

    return new_data_sensor


def look(source: PriceFile, known: dict[str, Any], now: float) -> tuple[dict[str, Any], str]:
    """Return what is known of a file after one more look, and why its ``digest`` is not known yet, "" where it is.

    ``known``, from the last look: the file's ``version``, ``since`` when it has had it, and the ``digest`` of that.
    """
    try:
        version = source.version()
        if version != known.get("version"):
            known = {"version": version, "since": now, "digest": ""}
        if (rest := known["since"] + QUIET_SECONDS - now) > 0:
            return known, f"{source.address} is read once it has not changed for another {format_duration(rest)}"
        if not known["digest"]:
            digest = source.digest()
            if source.version() != version:
                return known, f"{source.address} was written while it was read"
            known = {**known, "digest": digest}
    except Exception as error:  # a file system's own errors, of any kind; what was known stays
        return known, f"{source.address} cannot be read: {error or type(error).__name__}"
    return known, ""


def build_staleness_sensor(settings: Settings, names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that asks for a retraining when the last model is stale."""

    @dg.sensor(
        name=names.unique("staleness"),
        job_name=names.unique(TRAIN_JOB),
        required_resource_keys=names.resources,
        minimum_interval_seconds=600,
        default_status=dg.DefaultSensorStatus.STOPPED,  # retraining spends money: a person switches it on
        description=f"Retrains when no model was registered for {STALE_DAYS:g} days. "
        + budget_words(settings.retrain_budget_usd),
    )
    def staleness_sensor(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        event = context.instance.get_latest_materialization_event(names.key("registered_model"))
        if event is None or event.asset_materialization is None:
            return dg.SkipReason("no model was registered yet: nothing can be stale")
        version, now = read_entries(event.asset_materialization.metadata).get("version"), time.time()
        if cause := staleness(str(version), event.timestamp, now):
            return ask(context, cause, settings.retrain_budget_usd, names)
        rest = format_duration(event.timestamp + STALE_DAYS * DAY - now)
        return dg.SkipReason(f"version {version} was registered last: not stale before {rest} have passed")

    return staleness_sensor


def build_retraining_failed_sensor(project: ProjectResource, names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that notifies people of a failed run with a retraining's cause. ``project``: given here, since
    Dagster's decorator takes resources of fixed names only."""

    @dg.run_failure_sensor(
        name=names.unique("retraining_failed"),
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Notifies once when a run that the schedule or a sensor asked for has failed and its job did not "
        "report it.",
    )
    def retraining_failed(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        run = context.dagster_run
        cause = run.tags.get(CAUSE_TAG)
        if cause is None:
            return dg.SkipReason("a person started it")
        if names.pipeline and not cause.startswith(names.mark("")):
            return dg.SkipReason("it is a retraining of another graph, whose sensor reports it")
        [latest] = context.instance.get_runs(dg.RunsFilter(tags={CAUSE_TAG: cause}), limit=1)
        tickets = WaitingList(project.shared_uri).tickets()
        if latest.run_id != run.run_id or any(item.tags.get(CAUSE_TAG) == cause for item in tickets):
            return dg.SkipReason("it found no capacity: the sensor `queue` reports what happens to it")
        job = run.tags.get(JOB_TAG)
        if job is not None and _is_told_as_failed(RunDir(f"{project.jobs_uri}/{job}")):
            return dg.SkipReason("its job has failed, and its cluster has sent a notice")
        again = f"It is not tried again before its next cause; to train now, launch the job {names.unique(TRAIN_JOB)}."
        message = redact(f"{cause}: {context.failure_event.message}\n{again}\n{project.run_url(run.run_id)}")
        notify_and_log(project.notify_urls(), "dtrain: a retraining has failed", message, context.log)
        return None

    return retraining_failed


def _is_told_as_failed(rundir: RunDir) -> bool:
    """Return whether people were told that a job has failed. A run may fail after its job has finished."""
    try:
        status = rundir.read_json(STATUS) or {}
    except (DamagedError, OSError):
        return False
    return status.get("state") == JobState.FAILED and was_told(rundir, "end")

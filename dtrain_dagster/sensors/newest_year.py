"""The schedule ``newest_year``: it asks for the walk forward's newest test year on the prices that were read last."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date

import dagster as dg

from dtrain_dagster.automation.retraining import CAUSE_TAG, budget_words, run_config
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.graph_names import GraphNames
from dtrain_dagster.support.page_entries import read_entries

LEAST_DAYS = 30
"""The days that a year must have had: labels look ahead, and a test on fewer days says nothing."""


def build_newest_year(
    settings: Settings, graph: GraphNames, walk: GraphNames, years: dg.TimeWindowPartitionsDefinition, cron: str
) -> dg.ScheduleDefinition:
    """Return the schedule, switched off by default. ``graph``: the names of the graph that reads the prices; ``walk``:
    those of its walk forward, whose job has the name of the whole."""

    @dg.schedule(
        name=graph.unique("newest_year"),
        job_name=walk.pipeline,
        cron_schedule=cron,
        execution_timezone=settings.retrain_timezone,
        default_status=dg.DefaultScheduleStatus.STOPPED,  # it spends money: a person switches it on
        description=(
            "Makes the newest test year of the walk forward, once for each version of the prices that stock_prices "
            "has read last. " + budget_words(settings.retrain_budget_usd)
        ),
    )
    def newest_year(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        record = context.instance.get_latest_materialization_event(graph.key("stock_prices"))
        made = record.asset_materialization if record else None
        entries = read_entries(made.metadata) if made else {}
        if made is None or "last_date" not in entries:
            return dg.SkipReason("stock_prices was not made yet: materialize it, or switch a retraining on")
        last = str(entries["last_date"])
        year = newest_test_year(last, years.get_partition_keys())
        if year is None:
            limits = "DTRAIN_WALK_FORWARD_FIRST_YEAR and DTRAIN_WALK_FORWARD_LAST_YEAR"
            return dg.SkipReason(f"the prices end on {last}: {limits} leave no test year for them")
        key = f"{walk.pipeline}-{year}-{(made.tags or {}).get('dagster/data_version', last)}"
        tags = {CAUSE_TAG: key}
        config = run_config(settings.retrain_budget_usd, walk)
        return dg.RunRequest(run_key=key, partition_key=year, run_config=config, tags=tags)

    return newest_year


def newest_test_year(last_date: str, years: Collection[str]) -> str | None:
    """Return the newest of these years that prices up to ``last_date`` can test; None if there is none. Pure."""
    last = date.fromisoformat(last_date)
    begun = last.year if (last - date(last.year, 1, 1)).days >= LEAST_DAYS else last.year - 1
    reached = [year for year in years if int(year) <= begun]
    return max(reached, default=None)

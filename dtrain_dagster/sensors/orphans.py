"""The sensor ``orphans``: it reports or ends jobs that no run waits for any more, since they still cost money.

The cluster says which jobs no live run owns; this module decides what becomes of them. Several Dagster
instances may share a cluster: an orphan whose run this instance does not know is reported, and never ended from here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import dagster as dg

from dtrain_dagster.automation.run_liveness import LIVE
from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, InUseError, Orphan
from dtrain_dagster.costs.prices import price_words
from dtrain_dagster.resources import GPUClusterResource, cluster_resource, project_resource
from dtrain_dagster.sensors.watched_clusters import ELSEWHERE, usd_per_node_hour, watched_clusters
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log
from trainer.printable import visible

LEFT, FOREIGN = "left as it is", "left as it is: its run is not of this Dagster, so it may be another user's"
ENDED, ENDING, FAILED = "ended", "its end was asked for", "could not be ended"


def build_orphan_sensor(settings: Settings, names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that finds orphans and, after a grace time, reports or ends them, as the settings say."""
    grace, cancels = settings.orphan_minutes * 60, settings.orphan_policy == "cancel"
    what = "ends" if cancels else "reports"

    @dg.sensor(
        name=names.unique("orphans"),
        required_resource_keys=names.resources,
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Finds jobs that no live Dagster run owns; {what} them after {settings.orphan_minutes:g} minutes.",
    )
    def orphans(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        cluster, project = cluster_resource(context, names), project_resource(context, names)
        if not (keys := watched_clusters(context, names)):
            return dg.SensorResult(skip_reason=ELSEWHERE, cursor=context.cursor)
        manager, now = cluster.manager(), time.time()
        seen: dict[str, Any] = json.loads(context.cursor or "{}").get("orphans", {})
        live = {run.run_id for run in context.instance.get_runs(dg.RunsFilter(statuses=LIVE))}
        try:
            found = {_key(orphan): orphan for orphan in manager.find_orphans(live)}
        except (ClusterError, OSError) as error:  # the orphans seen so far, and their times, are kept
            return dg.SensorResult(skip_reason=f"orphans cannot be looked for now: {error}", cursor=context.cursor)
        known = {key: seen.get(key, {"since": now, "tried": 0.0, "told": ""}) for key in found}
        due = {key: found[key] for key in found if now - known[key]["since"] >= grace}
        spared = {key: "" if _is_own(context.instance, orphan) else FOREIGN for key, orphan in due.items()}
        may_end = [key for key, orphan in due.items() if not spared[key]] if cancels else []
        # One at a tick, right after it was seen: it may take half of the minute that a sensor has.
        turn = min(may_end, key=lambda key: known[key]["tried"], default=None)
        outcome = (LEFT, "")
        if turn is not None:  # before any message, which takes seconds: no run shall take the orphan over meanwhile
            known[turn]["tried"] = now
            try:
                outcome = _end(manager, due[turn])
            except InUseError as error:
                context.log.info(f"left as it is: {error}")
                del known[turn], due[turn]
        events: list[Any] = []
        for key, orphan in due.items():
            if cancels and not spared[key] and key != turn:
                continue
            done, problem = (spared[key], "") if spared[key] else outcome
            if done != known[key]["told"]:
                known[key]["told"] = done
                facts = describe_orphan(orphan, cluster, done + problem, now - known[key]["since"])
                message = visible("; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items()))
                context.log.warning(message)
                notify_and_log(project.notify_urls(), f"dtrain: no run waits for {orphan.name}", message, context.log)
                events += [_check(facts, item) for item in keys]
        if any(item["told"] for item in seen.values()) and not any(item["told"] for item in known.values()):
            events += [_check({}, item) for item in keys]
        return dg.SensorResult(
            asset_events=events,
            skip_reason=None if events else f"{len(found)} without a live run, nothing new to report",
            cursor=json.dumps({"orphans": known}),
        )

    return orphans


def describe_orphan(orphan: Orphan, cluster: GPUClusterResource, done: str, alone_seconds: float) -> dict[str, Any]:
    """Return the facts that a person needs, in order; each value is a figure or a few words."""
    remedy = f"materialize trained_checkpoint again to take it over, or `dtrain cancel {orphan.job_id}`"
    facts = {
        "name": orphan.name,
        "job_id": orphan.job_id,
        "why": orphan.reason,
        "alone_for": format_duration(alone_seconds),
        "what_was_done": done,
        "node_count": orphan.node_count,
        "sku": orphan.sku,
        "cost_per_hour": _cost_per_hour(orphan, cluster),
        "run": orphan.dagster_run_id,
        "studio": orphan.studio_url,
        "remedy": "" if done == ENDED else remedy,
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _cost_per_hour(orphan: Orphan, cluster: GPUClusterResource) -> str:
    """Return the cost of the nodes that it has, or waits for; "" where the price table has none."""
    usd = usd_per_node_hour(orphan.sku, orphan.tier, cluster)
    if usd is None:
        return ""
    return f"{dollars(orphan.node_count * usd)} ({price_words(orphan.sku, cluster.traits.buys_nodes)})"


def _key(orphan: Orphan) -> str:
    """Return its key with the run that follows it: one that takes it over, and ends too, starts a new grace time."""
    return f"{orphan.name} {orphan.dagster_run_id or ''}"


def _is_own(instance: dg.DagsterInstance, orphan: Orphan) -> bool:
    """Return whether it may be ended from here. An orphan without a run was made by hand, under this cluster's name."""
    return orphan.dagster_run_id is None or instance.has_run(orphan.dagster_run_id)


def _end(manager: GPUClusterManager, orphan: Orphan) -> tuple[str, str]:
    """End the orphan; return what was done, and what went wrong. Raise `InUseError` where a run wants it by now."""
    try:
        return (ENDED if manager.end_orphan(orphan) else ENDING), ""
    except InUseError:
        raise
    except (ClusterError, OSError) as error:
        return FAILED, f": {error}"


def _check(facts: Mapping[str, Any], key: dg.AssetKey) -> dg.AssetCheckEvaluation:
    """Return the check's evaluation; it passes once there is nothing more to report."""
    metadata = {name: dg.MetadataValue.url(value) if name == "studio" else value for name, value in facts.items()}
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name="no_orphans",
        passed=not facts,
        severity=dg.AssetCheckSeverity.WARN,
        metadata=metadata,
    )

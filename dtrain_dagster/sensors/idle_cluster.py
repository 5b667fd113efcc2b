"""The sensor ``idle_cluster``: it records what the cluster does, reports idle nodes, and gives them back.

Time is added up from look to look, so the sum survives a restart of the observer, and is whole where it looks seldom.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import dagster as dg

from dtrain_dagster.automation.run_liveness import run_at_work
from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, InUseError, NodePool
from dtrain_dagster.costs.prices import price_words
from dtrain_dagster.resources import GPUClusterResource, cluster_resource, project_resource
from dtrain_dagster.sensors.watched_clusters import ELSEWHERE, usd_per_node_hour, watched_clusters
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import dollars, format_duration
from dtrain_dagster.support.graph_names import STOCK_NAMES, GraphNames
from dtrain_dagster.support.notify import notify_and_log

PAUSE_SECONDS = 300.0
"""The pause after a try: the time that nodes may take to go after a scale-down was asked for."""
Outcome = Literal["", "scaled down", "asked for", "failed", "in use"]
"""The result of the last try; "" before the first. "in use": the pool is not idle, though it looks so."""
WORDS: dict[Outcome, str] = {
    "": "nothing was done",
    "scaled down": "scaled down",
    "asked for": "the service is removing them",
    "failed": "could not be scaled down, and is tried again",
    "in use": "left as it is: it is about to be used",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Idling:
    """A pool's idle state, kept from one look to the next."""

    seen_at: float
    """The time of the last look; Unix seconds."""
    used_at: float | None
    """`NodePool.used_at` at the last look."""
    idle_seconds: float = 0.0
    wasted_usd: float = 0.0
    next_try_seconds: float = 0.0
    """The idle time before which no further try is made."""
    outcome: Outcome = ""
    told: bool = False
    """Whether a person has been told of this idle interval."""


def look(before: Idling | None, pool: NodePool, usd_per_node_hour: float, now: float) -> Idling:
    """Return a pool's idle state after one more look. A job since the last look ends the interval, too."""
    fresh = Idling(seen_at=now, used_at=pool.used_at)
    if before is None or pool.work or not pool.node_count:
        return fresh
    passed = max(now - before.seen_at, 0.0)
    if pool.used_at is not None and pool.used_at != before.used_at:
        idle, since = fresh, min(max(now - pool.used_at, 0.0), passed)
    else:
        idle, since = replace(before, seen_at=now, used_at=pool.used_at), passed
    usd = since / 3600 * pool.node_count * usd_per_node_hour
    return replace(idle, idle_seconds=idle.idle_seconds + since, wasted_usd=idle.wasted_usd + usd)


def is_over(idling: Idling, pool: NodePool, limit_seconds: float) -> bool:
    """Return whether the pool has idled for longer than the limit and its own grace time."""
    return bool(pool.node_count) and not pool.work and idling.idle_seconds >= limit_seconds + pool.grace_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A pool's state at this tick."""

    pool: NodePool
    idling: Idling
    usd_per_node_hour: float | None
    """The price; None where the price table has none."""
    is_over: bool
    """Whether it has idled beyond the limit."""
    reason: str = ""
    """The reason why the last try failed."""

    @property
    def idle_nodes(self) -> int:
        """The number of nodes that cost money without work."""
        return 0 if self.pool.work else self.pool.node_count


def build_idle_cluster_sensor(settings: Settings, names: GraphNames = STOCK_NAMES) -> dg.SensorDefinition:
    """Return the sensor that records the cluster's state and scales down pools that have idled for too long."""
    limit_seconds = settings.idle_minutes * 60

    @dg.sensor(
        name=names.unique("idle_cluster"),
        required_resource_keys=names.resources,
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Records what the cluster does; gives it back after {settings.idle_minutes:g} idle minutes.",
    )
    def idle_cluster(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        cluster, project = cluster_resource(context, names), project_resource(context, names)
        if not (keys := watched_clusters(context, names)):
            return dg.SensorResult(skip_reason=ELSEWHERE, cursor=context.cursor)
        manager, now = cluster.manager(), time.time()
        before, recorded = read_cursor(context.cursor)
        try:
            pools = manager.pools()
        except (ClusterError, OSError) as error:  # the idle time so far is kept
            return dg.SensorResult(skip_reason=f"the nodes cannot be seen now: {error}", cursor=context.cursor)
        watched = []
        for pool in pools:
            usd = usd_per_node_hour(pool.sku, pool.tier, cluster)  # without one, it is given back all the same
            idling = look(before.get(pool.name), pool, usd or 0.0, now)
            over = is_over(idling, pool, limit_seconds)
            watched.append(Watched(pool=pool, idling=idling, usd_per_node_hour=usd, is_over=over))
        # One at a tick: it may take half of the minute that a sensor has.
        due = [item for item in watched if item.is_over and item.idling.idle_seconds >= item.idling.next_try_seconds]
        if due:
            turn = max(due, key=lambda item: item.idling.idle_seconds - item.idling.next_try_seconds)  # due for longest
            result = _scale_down(manager, turn, run_at_work(context.instance, keys, now))
            context.log.warning(describe_idle_pool(result, cluster))
            if result.idling.outcome == "scaled down" or (result.idling.outcome != "in use" and not result.idling.told):
                message = describe_idle_pool(result, cluster)
                result = replace(result, idling=replace(result.idling, told=True))
                title = f"dtrain: cluster {cluster.cluster_name} stood idle"
                notify_and_log(project.notify_urls(), title, message, context.log)
            watched[watched.index(turn)] = result
        facts = [idle_state_of(item) for item in watched if item.pool.node_count]
        is_news = facts != recorded
        return dg.SensorResult(
            asset_events=_events(watched, cluster, keys) if is_news else [],
            skip_reason=None if is_news else "nothing has changed" if facts else "no nodes: nothing to watch or to pay",
            cursor=json.dumps({"pools": {item.pool.name: asdict(item.idling) for item in watched}, "facts": facts}),
        )

    return idle_cluster


def read_cursor(text: str | None) -> tuple[dict[str, Idling], list[Any]]:
    """Return the pools' idle states at the last tick, and the facts that were recorded last; nothing where another
    version wrote them."""
    try:
        found = json.loads(text or "{}")
        return {name: Idling(**fields) for name, fields in found["pools"].items()}, list(found["facts"])
    except (ValueError, TypeError, KeyError):
        return {}, []


def idle_state_of(item: Watched) -> list[Any]:
    """Return the parts of a pool's state whose change is recorded: times and dollars always change."""
    states = sorted([state, count] for state, count in item.pool.states.items() if count)
    return [item.pool.name, states, bool(item.pool.work), item.is_over, item.idling.outcome]


def describe_idle_pool(item: Watched, cluster: GPUClusterResource) -> str:
    """Return a sentence on what was done about idle nodes, and what they cost."""
    pool = item.pool
    trouble = f" ({pool.trouble})" if pool.trouble else ""
    reason = f": {item.reason}" if item.reason else ""
    money = "at a price that the table does not know"
    if item.usd_per_node_hour is not None:
        per_hour, so_far = item.idle_nodes * item.usd_per_node_hour, item.idling.wasted_usd
        money = f"{dollars(per_hour)} per hour, {dollars(so_far)} so far ({_words(cluster)})"
    return (
        f"{pool.name}: {pool.node_count} x {pool.sku} without work for "
        f"{format_duration(item.idling.idle_seconds)}{trouble}, "
        f"{money}; {WORDS[item.idling.outcome]}{reason}"
    )


def _words(cluster: GPUClusterResource) -> str:
    return price_words(cluster.sku, cluster.traits.buys_nodes)


def _scale_down(manager: GPUClusterManager, item: Watched, run_id: str) -> Watched:
    """Scale the pool down, unless this run or another user is about to use it; return its state with the outcome."""
    outcome: Outcome = "in use"
    reason = f"Dagster run {run_id} is at work" if run_id else ""
    if not run_id:
        try:
            outcome = "scaled down" if manager.scale_down(item.pool) else "asked for"
        except InUseError as error:
            reason = str(error)
        except (ClusterError, OSError) as error:
            outcome, reason = "failed", str(error)
    idling = replace(item.idling, outcome=outcome, next_try_seconds=item.idling.idle_seconds + PAUSE_SECONDS)
    return replace(item, idling=idling, reason=reason)


def _events(watched: Sequence[Watched], cluster: GPUClusterResource, keys: Sequence[dg.AssetKey]) -> list[Any]:
    states = sum((Counter(item.pool.states) for item in watched), Counter[str]())
    metadata: dict[str, Any] = {
        "nodes": sum(item.pool.node_count for item in watched),
        **{f"nodes_{state}": count for state, count in sorted(states.items())},
        "states": "; ".join(_states(item.pool) for item in watched if item.pool.node_count) or "none",
        "running_jobs": ", ".join(dict.fromkeys(job for item in watched for job in item.pool.work)) or "none",
        "idle_seconds": round(max((item.idling.idle_seconds for item in watched), default=0.0), 1),
        "scaled_down": any(item.idling.outcome == "scaled down" for item in watched),
    }
    if all(item.usd_per_node_hour is not None for item in watched):
        metadata |= {
            "idle_usd_per_hour": round(sum(item.idle_nodes * (item.usd_per_node_hour or 0.0) for item in watched), 4),
            "wasted_usd": round(sum(item.idling.wasted_usd for item in watched), 6),
            "prices": _words(cluster),
        }
    idle = [describe_idle_pool(item, cluster) for item in watched if item.is_over]
    if idle:
        metadata["idle"] = dg.MarkdownMetadataValue("\n".join(f"- {line}" for line in idle))
    events: list[Any] = []
    for key in keys:
        check = dg.AssetCheckEvaluation(
            asset_key=key,
            check_name="not_idle",
            passed=not idle,
            severity=dg.AssetCheckSeverity.WARN,
            metadata=metadata,
        )
        events += [dg.AssetObservation(asset_key=key, metadata=metadata), check]
    return events


def _states(pool: NodePool) -> str:
    """Return ``dtrain-nc6sv3: 2 idle, 1 running``."""
    return f"{pool.name}: " + ", ".join(f"{count} {state}" for state, count in pool.states.items() if count)

"""A cluster that stands idle costs money: say so, and give it back (R1.2, C3)."""

import time

import dagster as dg

from dtrain_dagster.monitoring.advice import decide_idle
from dtrain_dagster.resources import GPUClusterResource
from dtrain_dagster.settings import Settings


def build_idle_cluster_sensor(settings: Settings) -> dg.SensorDefinition:
    limit_seconds = settings.idle_minutes * 60

    @dg.sensor(
        name="idle_cluster",
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Records what the cluster does; gives it back after {settings.idle_minutes:g} idle minutes.",
    )
    def idle_cluster(context: dg.SensorEvaluationContext, cluster: GPUClusterResource) -> dg.SensorResult:
        manager, now = cluster.manager(), time.time()
        health = manager.monitor_health()
        if not health.nodes:
            return dg.SensorResult(skip_reason="the cluster has no nodes: nothing to watch, nothing to pay", cursor="")
        ready_since = float(context.cursor) if context.cursor else now
        decision = decide_idle(health, manager.list_jobs(), ready_since, now, limit_seconds)
        if decision.scale_down:
            context.log.warning(f"idle for {decision.idle_seconds / 60:.0f} minutes: giving the cluster back")
            manager.cleanup_cluster()
        metadata: dict[str, int | float | str | bool] = {
            "nodes": len(health.nodes),
            "running_jobs": ", ".join(health.running_jobs) or "none",
            "idle_seconds": round(decision.idle_seconds, 1),
            "scaled_down": decision.scale_down,
        }
        return dg.SensorResult(
            asset_events=[
                dg.AssetObservation(asset_key="gpu_cluster", metadata=metadata),
                dg.AssetCheckEvaluation(
                    asset_key=dg.AssetKey("gpu_cluster"),
                    check_name="not_idle",
                    passed=not decision.scale_down,
                    severity=dg.AssetCheckSeverity.WARN,
                    metadata=metadata,
                ),
            ],
            cursor="" if decision.scale_down else str(ready_since),
        )

    return idle_cluster

"""A running job that costs more than was estimated is noticed while it runs, not on the bill (R5.4, C3)."""

import json

import dagster as dg

from dtrain_dagster.costs.plan import STAND_IN
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.jobs import PLAN
from dtrain_dagster.monitoring.advice import decide_overrun
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.settings import Settings
from dtrain_dagster.wording import dollars
from trainer.rundir import RunDir


def build_cost_overrun_sensor(settings: Settings) -> dg.SensorDefinition:
    @dg.sensor(
        name="cost_overrun",
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Fails a check, once per job, at {settings.overrun_fraction:.0%} above the estimated cost.",
    )
    def cost_overrun(
        context: dg.SensorEvaluationContext, cluster: GPUClusterResource, project: ProjectResource
    ) -> dg.SensorResult:
        manager = cluster.manager()
        alerted: list[str] = json.loads(context.cursor) if context.cursor else []
        running = [job.job_id for job in manager.active_jobs()]
        evaluations = []
        for job_id in running:
            plan = RunDir(f"{project.jobs_uri}/{job_id}").read_json(PLAN)
            if plan is None or job_id in alerted:
                continue
            tracker = CostTracker(cluster.cluster_name, manager.node_usage(job_id), plan["tier"])
            estimated = plan["estimate"]["usd"]["expected"]
            decision = decide_overrun(tracker.total_usd, estimated, plan["node_count"], settings.overrun_fraction)
            if not decision.alert:
                continue
            alerted.append(job_id)
            spent = dollars(tracker.total_usd)
            context.log.warning(
                f"{job_id}: {spent}, {decision.fraction:.0%} above the estimate of {dollars(estimated)}"
            )
            evaluations.append(
                dg.AssetCheckEvaluation(
                    asset_key=dg.AssetKey("trained_checkpoint"),
                    check_name="cost_within_estimate",
                    passed=False,
                    severity=dg.AssetCheckSeverity.WARN,
                    metadata={
                        "job_id": job_id,
                        "cost_so_far": f"{spent} ({plan.get('price_words', STAND_IN)})",
                        "estimate": dollars(estimated),
                        "above_estimate_percent": round(100 * decision.fraction, 1),
                        "advice": decision.advice,
                    },
                )
            )
        return dg.SensorResult(
            asset_events=evaluations,
            skip_reason=None if evaluations else f"{len(running)} running job(s), none newly above its estimate",
            cursor=json.dumps([job_id for job_id in alerted if job_id in running]),
        )

    return cost_overrun

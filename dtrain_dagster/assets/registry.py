"""Registration: the checkpoint becomes a version, a real scoring server proves it, and a gate promotes it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dagster as dg

from dtrain_dagster.assets.common import head_of_page, links, plan_of, read_finished, round_figures, sentences
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import PriceError
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.progress import code_version
from dtrain_dagster.jobs.totals import read_phase_totals, sum_launches
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, cluster_resource, project_resource
from dtrain_dagster.settings.notices import run_page
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.graph_names import GraphNames
from dtrain_dagster.support.page_entries import fit_page
from trainer.evaluation.gate import POINT_RULE, RULE, score_of
from trainer.rundir import RESULT, RunDir

if TYPE_CHECKING:
    from dtrain_dagster.registry import EndpointCheck, Gate, RegisteredModel, TrainingProvenance


def build_registered_model(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `registered_model` of a graph. Of a script's model there is no check `promotion_gate`: a script
    brings no baselines."""
    names, key, is_script = pipeline.names, pipeline.names.key("registered_model"), pipeline.source == "script"
    gate = dg.AssetCheckSpec(
        "promotion_gate",
        asset=key,
        blocking=True,
        description=f"{RULE[0].upper()}{RULE[1:]}. A point forecast of windows: {POINT_RULE}.",
    )
    passes = "its measure is beyond chance" if is_script else "it passes the check promotion_gate"

    @dg.asset(
        **pipeline.asset(
            "registered_model",
            "registry",
            inputs=(*(() if is_script else ("sharded_dataset",)), "cost_estimate", "trained_checkpoint"),
        ),
        kinds={"mlflow"},
        required_resource_keys=names.resources,
        description="The model as a version in MLflow's registry, with its data, code, node-hours and dollars. Its "
        f"alias is champion if {passes}, a real server answers with its numbers, and it beats the previous champion on "
        "the same samples; otherwise it is challenger.",
        check_specs=[*(() if is_script else (gate,)), _served(key)],
    )
    def registered_model(context: dg.AssetExecutionContext, **inputs: Any):  # no annotation, see assets.common
        """Register the trained model as a version, check it with a scoring server, and give it an alias."""
        return register(context, names, inputs["cost_estimate"], inputs["trained_checkpoint"], is_gated=not is_script)

    return registered_model


def _served(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        "serving_endpoint_answers",
        asset=key,
        blocking=True,
        description="A real MLflow scoring server answers real samples with the numbers of the trained weights.",
    )


def register(
    context: dg.AssetExecutionContext, names: GraphNames, plan: TrainingPlan, job: FinishedJob, is_gated: bool = True
) -> dg.MaterializeResult:
    """Return the version of a finished job, its page and its checks. ``is_gated``: whether the gate is one of them."""
    cluster, project = cluster_resource(context, names), project_resource(context, names)
    # Here, not above: these load MLflow.
    from dtrain_dagster.registry.registration import register_job

    rundir = RunDir(job.run_dir)
    provenance = provenance_of(context, cluster, project, job, plan_of(rundir, plan))
    found = register_job(
        cluster.registry(project, context.run.run_id),
        project.home,
        job.run_dir,
        project.model_name,
        provenance,
        experiment=project.experiment,
        cache_dir=project.cache_dir,
        told=context.log.info,
    )
    model, decision, evaluation = found.model, found.decision, found.evaluation
    result = read_finished(rundir, RESULT)
    worth, decided = worth_line(evaluation, provenance.cost_usd_total), decision.reason.partition(", because")[0]
    results = check_results(found.verdict, evaluation, found.serving)
    return dg.MaterializeResult(
        value={"name": model.name, "version": model.version, "uri": model.uri, "run_dir": job.run_dir},
        data_version=dg.DataVersion(result["weights_sha256"]),
        metadata=fit_page(
            {
                **head_of_page(
                    f"{model.name} version {model.version} is {decision.alias}: {decided}.",
                    "",
                    {"version": model.version, "alias": decision.alias, **_test_score(evaluation)},
                ),
                **({"earned": worth} if worth else {}),
                **links(**mlflow_pages(project.mlflow_url, model)),
                "model": model.name,
                "reason": decision.reason,
                "replaced_champion": found.replaced or "none",
                "uri": model.uri,
                "mlflow_run_id": model.run_id,
                "model_card": dg.MarkdownMetadataValue(found.card),
                "tags": dg.JsonMetadataValue(dict(model.tags)),
            }
        ),
        check_results=results if is_gated else results[1:],
    )


def mlflow_pages(mlflow_url: str, model: "RegisteredModel") -> dict[str, str]:
    """Return the addresses of a version and of its run in MLflow's UI; none where that is not known. Pure."""
    if not mlflow_url:
        return {}
    return {
        "model_page": f"{mlflow_url}/#/models/{quote(model.name, safe='')}/versions/{model.version}",
        "run_page": run_page(mlflow_url, model.run_id),
    }


def _test_score(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    score = score_of(evaluation)
    return {f"test_{score}": round_figures(evaluation["model"][score])} if score else {}


def provenance_of(
    context: dg.AssetExecutionContext,
    cluster: GPUClusterResource,
    project: ProjectResource,
    job: FinishedJob,
    plan: TrainingPlan,
) -> "TrainingProvenance":
    """Return a version's record of its making: nodes, hours, dollars, code, and the Dagster run."""
    from dtrain_dagster.registry import TrainingProvenance

    usage, rundir = [*cluster.manager().node_usage(job.job_id), *plan.probe_usage], RunDir(job.run_dir)
    took, phases = sum_launches(usage), read_phase_totals(rundir, rundir.events())
    sku = ", ".join(sorted({interval.sku for interval in usage}))
    cost_usd, in_words = cost_of(usage, sku, plan, job.cluster_name)
    if cost_usd is None:
        context.log.warning(in_words)
    return TrainingProvenance(
        nodes=job.node_count,
        node_hours=took.node_hours,
        launches=max(1, took.launches),
        train_seconds=phases.get("training"),
        cost_usd=in_words,
        cost_usd_total=cost_usd,
        sku=sku,
        code_version=code_version(),
        dagster_run_id=context.run.run_id,
        dagster_run_url=project.run_url(context.run.run_id),
    )


def check_results(
    verdict: "Gate", evaluation: Mapping[str, Any], serving: "EndpointCheck"
) -> list[dg.AssetCheckResult]:
    """Return both blocking checks of a version: the gate's, and that of a real server's answers."""
    score = score_of(evaluation)
    figure = {f"test_{score}": evaluation["model"][score]} if score else {"test_score": "not judged"}
    return [
        dg.AssetCheckResult(
            check_name="promotion_gate",
            passed=verdict.passed,
            metadata={"reasons": sentences(verdict.reasons), **figure},
        ),
        dg.AssetCheckResult(
            check_name="serving_endpoint_answers",
            passed=serving.passed,
            metadata=serving.figures(),
        ),
    ]


def cost_of(usage: Sequence[NodeUsage], sku: str, plan: TrainingPlan, cluster_name: str) -> tuple[float | None, str]:
    """Return a training's dollars as a number (None without a known price) and in words. An unknown price raises
    nothing: the training is already paid for."""
    try:
        total = CostTracker(cluster_name, usage, plan.tier).total_usd
    except PriceError as error:
        return None, f"cost not known: {error}"
    return total, f"{dollars(total)} ({sku}: {plan.price_words})"

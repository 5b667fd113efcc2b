"""Registration: the checkpoint becomes a version, a real scoring server proves it, and a gate promotes it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import dagster as dg

from dtrain_dagster.assets.common import head_of_page, links, round_figures, sentences
from dtrain_dagster.assets.outcome import Outcome
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.costs.worth import worth_line
from dtrain_dagster.jobs.totals import cost_of
from dtrain_dagster.settings.links import run_page
from dtrain_dagster.support.page_entries import fit_page
from trainer.evaluation.gate import POINT_RULE, RULE, score_of

if TYPE_CHECKING:
    from dtrain_dagster.registry.endpoint import EndpointCheck
    from dtrain_dagster.registry.versions import RegisteredModel
    from trainer.evaluation.gate import Gate


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
        outcome = Outcome(context, names, inputs["cost_estimate"], inputs["trained_checkpoint"])
        return register(outcome, is_gated=not is_script)

    return registered_model


def _served(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        "serving_endpoint_answers",
        asset=key,
        blocking=True,
        description="A real MLflow scoring server answers real samples with the numbers of the trained weights.",
    )


def register(outcome: Outcome, is_gated: bool) -> dg.MaterializeResult:
    """Return the version of a finished job, its page and its checks. ``is_gated``: whether the gate is one of them."""
    context, project, job = outcome.context, outcome.project, outcome.job
    # Here, not above: these load MLflow.
    from dtrain_dagster.registry.registration import provenance_of, register_job

    run_id, cost = context.run.run_id, cost_of(outcome.billed, outcome.plan.tier, outcome.plan.price_words)
    outcome.warn(cost[1] if cost[0] is None else "")
    made = provenance_of(outcome.rundir, outcome.billed, job.node_count, cost, run_id, project.run_url(run_id))
    found = register_job(
        outcome.cluster.registry(project, run_id),
        project.home,
        job.run_dir,
        project.model_name,
        made,
        experiment=project.experiment,
        cache_dir=project.cache_dir,
        told=context.log.info,
    )
    model, decision, evaluation = found.model, found.decision, found.evaluation
    worth, decided = worth_line(evaluation, made.cost_usd_total), decision.reason.partition(", because")[0]
    results = check_results(found.verdict, evaluation, found.serving)
    return dg.MaterializeResult(
        value={"name": model.name, "version": model.version, "uri": model.uri, "run_dir": job.run_dir},
        data_version=dg.DataVersion(outcome.result["weights_sha256"]),
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

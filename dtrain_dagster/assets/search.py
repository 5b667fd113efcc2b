"""The asset `hyperparameter_search`: trials of the planned training over a space, under one budget, the settings of the
best one, and the page with what each improvement cost."""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import (
    MOST_ROWS,
    LaunchpadOptions,
    best_rows,
    head_of_page,
    links,
    refusing_mistakes,
    round_figures,
    sentences,
)
from dtrain_dagster.assets.pipeline import STUDIES, Pipeline
from dtrain_dagster.assets.training import of_plan
from dtrain_dagster.costs.estimate import Parts
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.jobs.spending import Wanted
from dtrain_dagster.reports.small_pictures import small_curves
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, cluster_resource, project_resource
from dtrain_dagster.search.space import parse_space
from dtrain_dagster.search.trials import MOST_TRIALS, Pruner, Sampler, SearchSettings
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.links import run_page
from dtrain_dagster.support.page_entries import fit_page
from trainer.config import JobConfig, parse_job

if TYPE_CHECKING:
    from dtrain_dagster.search.run import Search, SearchRequest

DEFAULT_SPACE = {
    "training.learning_rate": {"low": 3e-4, "high": 1e-2, "log": True},
    "training.weight_decay": {"low": 1e-4, "high": 0.3, "log": True},
}
"""What the launchpad begins with: what every training has."""


class SearchOptions(LaunchpadOptions):
    """The space, the trials and the budget of a search, in the launchpad."""

    space: dict[str, Any] = DEFAULT_SPACE
    """Field → range or list of choices, such as {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
    "model.args.channels": [16, 32]}; see docs/many-trainings.md."""
    metric: str = "loss"
    """Of the validation split: loss, or a metric of the task, such as accuracy."""
    maximise: bool = False
    """Whether more of the metric is better."""
    trials: int = Field(default=16, ge=1, le=MOST_TRIALS)
    """The largest number of trials."""
    parallel: int = Field(default=0, ge=0)
    """Trials at once; 0: as many as there are nodes for."""
    nodes_per_trial: int = Field(default=1, ge=1)
    """Nodes of one trial. Its batches stay those of the plan."""
    budget_usd: float = Field(default=0.0, ge=0, lt=math.inf)
    """Dollars that all trials may cost together, held by the nodes. 0: twice what all of them take to their ends."""
    sampler: Sampler = Sampler.gp
    """How values are drawn: where most improvement is expected (gp), or at random."""
    pruner: Pruner = Pruner.asha
    """What ends trials early: successive halving (asha), or nothing."""
    seed: int = Field(default=0, ge=0)
    """The same seed gives the same trials."""
    name: str = ""
    """Name of the search; empty: made from all that it is, so that materializing again continues it."""


def build_hyperparameter_search(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `hyperparameter_search` of a graph, in a group of its own: it is not part of retraining."""
    options = pipeline.options("hyperparameter_search", SearchOptions)

    @dg.asset(
        **pipeline.asset("hyperparameter_search", STUDIES, inputs=("sharded_dataset", "cost_estimate"))
        | {"group_name": pipeline.names.unique(STUDIES)},
        kinds={"python"},
        required_resource_keys=pipeline.names.resources,
        description=(
            "Trials of the planned training over a space, several at once under one budget, ended early by successive "
            "halving. Give its file to `settings_file` of `cost_estimate`. It runs trainings, so it is not part of the "
            "job `train`."
        ),
    )
    def hyperparameter_search(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
        sharded_dataset: BuiltDataset,
        cost_estimate: TrainingPlan,
    ):  # no annotation, see assets.common
        """Search the space, and show what was found and what it cost."""
        cluster, project = cluster_resource(context, pipeline.names), project_resource(context, pipeline.names)
        return search_space(context, config, cluster, project, sharded_dataset, cost_estimate)

    return hyperparameter_search


def search_space(
    context: dg.AssetExecutionContext,
    config: SearchOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    dataset: BuiltDataset,
    plan: TrainingPlan,
) -> dg.MaterializeResult:
    """Return the search of a space around a plan's training."""
    from dtrain_dagster.dashboard.job_list import jobs_page
    from dtrain_dagster.planning.check_job import check_job
    from dtrain_dagster.search.run import Measured, open_search, seconds_of_parts, trial_id
    from dtrain_dagster.search.space import check_space
    from dtrain_dagster.search.tracking import SearchTracker

    cluster = of_plan(cluster, plan)
    with refusing_mistakes():
        request = request_of(config, project, dataset, plan)
        space = parse_space(config.space, "launchpad: space")
        ranks = request.nodes_per_trial * request.processes_per_node
        for sentence in check_space(
            space, request.base, lambda job: check_job(job, ranks).sentences, "launchpad: space"
        ):
            context.log.warning(sentence)
        run, began_at = ClusterRun.of(context, cluster, project), time.time()
    run.provision(plan.sku, request.nodes_per_trial)
    phases = {name: plan.phases.get(name, 0.0) for name in ("startup", "steps", "evaluation", "checkpoint", "finish")}
    expected = seconds_of_parts(Parts(**phases), plan.node_count, plan.work.evaluations)
    env, log = cluster.node_env(project), context.log.info
    tracker = None
    with refusing_mistakes():
        search = open_search(Path(project.home), request, run.manager, env, lambda: Measured(expected), log)
        log(f"search {request.name}: {'; '.join(search.plan.lines)}")
        with run.promising(Wanted(request.name, search.budget_usd, is_group=True)):
            if not project.tracks_in_workspace:
                uri, settings = project.tracking_uri, request.settings
                tracker = SearchTracker(uri, project.experiment, request.name, settings.metric, settings.sign)
            result = search.run(log, tracker=tracker)
    best = result["best"]
    addresses = {
        "best_job": project.job_url(trial_id(request.name, best["trial"])) if best else "",
        "all_jobs": jobs_page(project.dashboard_url, request.name),
        "run_page": run_page(project.mlflow_url, tracker.run_id if tracker else ""),
    }
    return dg.MaterializeResult(
        value={"name": request.name, "settings_file": result["settings_file"], "best": best},
        metadata=fit_page(search_page(search, result, plan.price_words, time.time() - began_at, addresses)),
    )


def request_of(
    config: SearchOptions, project: ProjectResource, dataset: BuiltDataset, plan: TrainingPlan
) -> "SearchRequest":
    """Return what is searched; without a name, under one made of all that it is. Raise `ConfigError` for what cannot
    be."""
    from dtrain_dagster.search.run import SearchRequest

    drawn = ("trials", "sampler", "pruner", "seed", "metric", "maximise")
    place = {"job_id": "search", "run_dir": f"{project.jobs_uri}/search", "tracking": {"tensorboard": False}}
    base: JobConfig = parse_job(json.dumps({**plan.sections, **place}), source="the plan")
    request = SearchRequest(
        name=config.name or "search",
        space=config.space,
        settings=SearchSettings(
            parallel=config.parallel or max(1, plan.node_count // config.nodes_per_trial),
            **{name: getattr(config, name) for name in drawn},
        ),
        base=base,
        samples=dataset.samples,
        budget_usd=config.budget_usd or None,
        nodes=plan.node_count,
        nodes_per_trial=config.nodes_per_trial,
        processes_per_node=plan.processes_per_node,
        usd_per_node_hour=price_of(plan.sku).usd_per_hour(tier_of(plan.tier)),
        tier=tier_of(plan.tier),
    )
    if config.name:
        return request
    what = json.dumps([request.described(), plan.fingerprint], sort_keys=True)
    return replace(request, name=f"search-{hashlib.sha256(what.encode()).hexdigest()[:10]}")


def search_page(
    search: "Search", result: Mapping[str, Any], price_words: str, seconds: float, addresses: Mapping[str, str]
) -> dict[str, Any]:
    """Return the page of a search that is over. ``seconds``: of this process with it; ``addresses``: the pages of the
    web about it, by their names."""
    from dtrain_dagster.search.results import RESULT, improvement_lines, summary

    metric, best = result["metric"], result["best"]
    found, paid = summary(result)[:2]
    return {
        **head_of_page(
            f"{found[0].upper()}{found[1:]}; {paid} ({price_words}).",
            small_curves({f"best {metric} over dollars": steps_of(result)}),
            {
                f"best_{metric}": round_figures(best["score"]) if best else None,
                "cost_usd": round_figures(result["usd"]),
                "trials": len(result["trials"]),
            },
        ),
        **({"best_trials": best_rows(trial_rows(result, search.request.settings.sign))} if result["trials"] else {}),
        **links(**addresses),
        **({"settings_file": dg.MetadataValue.path(result["settings_file"])} if best else {}),
        "all_trials": dg.MetadataValue.path(f"{search.folder}/{RESULT}"),
        "search": search.request.name,
        **({"best_trial": best["trial"], "best_values": dg.JsonMetadataValue(best["values"])} if best else {}),
        "improvements": sentences(improvement_lines(result)),
        "planned": sentences(search.plan.lines),
        "price": price_words,
        "seconds": round(seconds, 1),
    }


def steps_of(result: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the best score so far over the dollars of all trials, as the corners of a line of steps. Pure."""
    corners: list[tuple[float, float]] = []
    for item in result["improvements"]:
        before = [(item["usd"], corners[-1][1])] if corners else []
        corners += [*before, (item["usd"], item["score"])]
    return [*corners, (result["usd"], corners[-1][1])] if corners else []


def trial_rows(result: Mapping[str, Any], sign: float) -> list[dict[str, Any]]:
    """Return a row for each of the best trials, the best first; those without a score come last. Pure."""
    from dtrain_dagster.search.space import shown_values

    metric = result["metric"]
    scored = [row for row in result["trials"] if row["score"] is not None]
    rows = sorted(scored, key=lambda row: (sign * row["score"], row["trial"]))
    rows += [row for row in result["trials"] if row["score"] is None]
    return [
        {
            "trial": row["trial"],
            metric: "–" if row["score"] is None else f"{row['score']:.6g}",
            "usd": round(row["usd"], 4),
            "evaluations": row["evaluations"],
            "values": shown_values(row["values"]),
        }
        for row in rows[:MOST_ROWS]
    ]

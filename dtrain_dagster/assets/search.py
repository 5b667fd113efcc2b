"""The asset `hyperparameter_search`: trials of the planned training over a space, under one budget, the settings of the
best one, and the page with what each improvement cost."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.ceilings import promising, wanted_by_run
from dtrain_dagster.assets.common import (
    MOST_ROWS,
    LaunchpadOptions,
    best_rows,
    head_of_page,
    links,
    refusing_mistakes,
    round_figures,
)
from dtrain_dagster.assets.pipeline import STUDIES, Pipeline
from dtrain_dagster.assets.provisioning import provision
from dtrain_dagster.assets.training import of_plan
from dtrain_dagster.costs.estimate import Parts
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.reports.small_pictures import small_curves
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, cluster_resource, project_resource
from dtrain_dagster.search.settings import Pruner, Sampler, SearchSettings
from dtrain_dagster.search.space import parse_space
from dtrain_dagster.settings.notices import run_page
from dtrain_dagster.settings.tiers import tier_of
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.page_entries import fit_page
from trainer.config import JobConfig, parse_job

if TYPE_CHECKING:
    from dtrain_dagster.search.results import Improvement
    from dtrain_dagster.search.run import Search, SearchRequest
    from dtrain_dagster.search.source import TrialSource
    from dtrain_dagster.search.space import Space
    from dtrain_dagster.search.trials import Trial

DEFAULT_SPACE = {
    "training.learning_rate": {"low": 3e-4, "high": 1e-2, "log": True},
    "training.weight_decay": {"low": 1e-4, "high": 0.3, "log": True},
}
"""What the launchpad begins with: what every training has."""
MOST_PARAMETERS = 2
"""The columns of values on the page; the file has all."""


class SearchOptions(LaunchpadOptions):
    """The space, the trials and the budget of a search, in the launchpad."""

    space: dict[str, Any] = DEFAULT_SPACE
    """Field → range or list of choices, such as {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": true},
    "model.args.channels": [16, 32]}; see docs/many-trainings.md."""
    metric: str = "loss"
    """Of the validation split: loss, or a metric of the task, such as accuracy."""
    maximise: bool = False
    """Whether more of the metric is better."""
    trials: int = Field(default=16, ge=1)
    """The largest number of trials."""
    parallel: int = Field(default=0, ge=0)
    """Trials at once; 0: as many as there are nodes for."""
    least_nodes: int = Field(default=1, ge=1)
    """Nodes with which a trial begins at least. Its batches stay those of the plan."""
    most_nodes: int = Field(default=1, ge=1)
    """Nodes of a trial at most."""
    budget_usd: float = Field(default=0.0, ge=0, lt=math.inf)
    """Dollars that all trials may cost together, held by the nodes. 0: twice what all of them take to their ends."""
    sampler: Sampler = Sampler.gp
    """How values are drawn: where most improvement is expected (gp), at random, or all of a grid."""
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
    from dtrain_dagster.planning.check_job import check_job
    from dtrain_dagster.search.check_space import check_space
    from dtrain_dagster.search.run import Measured, open_search, seconds_of_parts

    cluster = of_plan(cluster, plan)
    with refusing_mistakes():
        request = request_of(config, project, dataset, plan)
        space = parse_space(config.space, "launchpad: space")
        ranks = request.least_nodes * request.processes_per_node
        for sentence in check_space(
            space, request.base, lambda job: check_job(job, ranks).sentences, "launchpad: space"
        ):
            context.log.warning(sentence)
    manager = cluster.manager(context.run.run_id)
    provision(context, manager, cluster, project, plan.sku, request.least_nodes)
    phases = {name: plan.phases.get(name, 0.0) for name in ("startup", "steps", "evaluation", "checkpoint", "finish")}
    expected = seconds_of_parts(Parts(**phases), plan.node_count, plan.work.evaluations)
    env = cluster.node_env(project)
    with refusing_mistakes():
        search = open_search(Path(project.home), request, manager, env, lambda: Measured(expected), context.log.info)
        context.log.info(f"search {request.name}: {'; '.join(search.plan.lines)}")
        hourly = request.at_once * request.usd_per_node_hour
        wanted = wanted_by_run(context, project, request.name, hourly, search.budget_usd, is_group=True)
        with promising(context, cluster, project, wanted):
            source, run_id = follow_search(context, search, project)
    return show_search(search, source, plan, pages_of(project, search, source, run_id))


def pages_of(project: ProjectResource, search: "Search", source: "TrialSource", run_id: str) -> dict[str, str]:
    """Return the addresses of a search's jobs and of its best trial on the dashboard, and of its run in MLflow.
    ``run_id``: "" where there is none."""
    from dtrain_dagster.dashboard.job_list import jobs_page
    from dtrain_dagster.search.run import trial_id

    name, best = search.request.name, source.best
    return {
        "best_job": project.job_url(trial_id(name, best.number)) if best else "",
        "all_jobs": jobs_page(project.dashboard_url, name),
        "run_page": run_page(project.mlflow_url, run_id),
    }


def follow_search(
    context: dg.AssetExecutionContext, search: "Search", project: ProjectResource
) -> "tuple[TrialSource, str]":
    """Run a search to its end, tell how it stands, and write its trials to MLflow as they end. Return its trials, and
    the id of its run in MLflow, "" where it has none."""
    from dtrain_dagster.search.tracking import SearchTracker

    settings, tracker = search.request.settings, None
    if not project.tracks_in_workspace:
        tracker = SearchTracker(
            project.tracking_uri, project.experiment, search.request.name, settings.metric, settings.sign
        )
    ended = 0

    def watch(trials: "Sequence[Trial]", line: str) -> None:
        nonlocal ended
        before, ended = ended, sum(trial.state.is_final for trial in trials)
        if ended != before:
            context.log.info(line)

    return search.run(watch, tracker, context.log.warning), tracker.run_id if tracker else ""


def request_of(
    config: SearchOptions, project: ProjectResource, dataset: BuiltDataset, plan: TrainingPlan
) -> "SearchRequest":
    """Return what is searched. Raise `ConfigError` for what cannot be."""
    from dtrain_dagster.search.run import SearchRequest

    nodes = plan.node_count
    settings = SearchSettings(
        trials=config.trials,
        parallel=config.parallel or max(1, nodes // config.least_nodes),
        sampler=config.sampler,
        pruner=config.pruner,
        seed=config.seed,
        metric=config.metric,
        maximise=config.maximise,
    )
    place = {"job_id": "search", "run_dir": f"{project.jobs_uri}/search", "tracking": {"tensorboard": False}}
    base: JobConfig = parse_job(json.dumps({**plan.sections, **place}), source="the plan")
    request = SearchRequest(
        name="search",
        space=config.space,
        settings=settings,
        base=base,
        samples=dataset.samples,
        budget_usd=config.budget_usd or None,
        nodes=nodes,
        least_nodes=config.least_nodes,
        most_nodes=max(config.least_nodes, config.most_nodes),
        processes_per_node=plan.processes_per_node,
        usd_per_node_hour=price_of(plan.sku).usd_per_hour(tier_of(plan.tier)),
        tier=tier_of(plan.tier),
    )
    return replace(request, name=config.name or f"search-{mark_of(request, plan)}")


def mark_of(request: "SearchRequest", plan: TrainingPlan) -> str:
    """Return what tells searches apart that were given no name: ten hex digits over all that they are."""
    what = json.dumps([request.described(), plan.fingerprint], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()[:10]


def show_search(
    search: "Search", source: "TrialSource", plan: TrainingPlan, addresses: Mapping[str, str]
) -> dg.MaterializeResult:
    """Return the asset of a search that is over. ``addresses``: the pages of the web about it, by their names."""
    result, seconds = search.result(source), time.time() - search.began_at
    return dg.MaterializeResult(
        value={"name": search.request.name, "settings_file": result["settings_file"], "best": result["best"]},
        metadata=fit_page(search_page(search, source, plan.price_words, seconds, addresses)),
    )


def search_page(
    search: "Search", source: "TrialSource", price_words: str, seconds: float, addresses: Mapping[str, str]
) -> dict[str, Any]:
    """Return the page of a search that is over. ``seconds``: of this process with it; ``addresses``: the pages of the
    web about it, by their names."""
    from dtrain_dagster.search.results import improvements

    settings, trials, result = search.request.settings, source.trials, search.result(source)
    metric, sign, best = settings.metric, settings.sign, result["best"]
    found = improvements(trials, sign)
    return {
        **head_of_page(
            verdict_of(result, price_words),
            small_curves({f"best {metric} over dollars": steps_of(found, result["usd"])}),
            {
                f"best_{metric}": round_figures(best["score"]) if best else None,
                "cost_usd": round_figures(result["usd"]),
                "trials": len(trials),
            },
        ),
        **({"best_trials": best_rows(trial_rows(source.space, trials, sign, metric))} if trials else {}),
        **links(**addresses),
        **({"settings_file": dg.MetadataValue.path(search.best_file)} if best else {}),
        "all_trials": dg.MetadataValue.path(search.result_file),
        "search": search.request.name,
        **({"best_trial": best["trial"], "best_values": dg.JsonMetadataValue(best["values"])} if best else {}),
        "improvements": dg.MarkdownMetadataValue(improvements_list(found, metric)),
        "planned": dg.MarkdownMetadataValue("\n".join(f"- {line}" for line in search.plan.lines)),
        "price": price_words,
        "seconds": round(seconds, 1),
    }


def verdict_of(result: Mapping[str, Any], price_words: str) -> str:
    """Return in a sentence which trial was best, how the others ended, and what all have cost. ``result``:
    `dtrain_dagster.search.results.result_document`. Pure."""
    best, counts, count = result["best"], result["counts"], len(result["trials"])
    paid = (
        f"all {count} trials cost {dollars(result['usd'])} ({price_words})"
        if count > 1
        else (f"it cost {dollars(result['usd'])} ({price_words})")
    )
    if best is None:
        reason = next((row["reason"] for row in result["trials"] if row["reason"]), "")
        return f"No trial was evaluated{f' ({reason})' if reason else ''}; {paid}."
    ended = [
        f"{counts[state]} {words}"
        for state, words in (("pruned", "ended early"), ("failed", "failed"))
        if counts.get(state)
    ]
    others = f"; {' and '.join(ended)}" if ended else ""
    return (
        f"Trial {best['trial']} of {count} is the best: {result['metric']} {best['score']:.6g} after "
        f"{best['evaluations']} evaluations{others}; {paid}."
    )


def steps_of(found: "Sequence[Improvement]", usd: float) -> list[tuple[float, float]]:
    """Return the best score so far over the dollars of all trials, as the corners of a line of steps. Pure."""
    corners: list[tuple[float, float]] = []
    for item in found:
        corners += [(item.usd, corners[-1][1]), (item.usd, item.score)] if corners else [(item.usd, item.score)]
    return [*corners, (usd, corners[-1][1])] if corners else []


def improvements_list(found: "Sequence[Improvement]", metric: str) -> str:
    """Return each improvement with its price, as a Markdown list. Pure."""
    lines = [
        f"- trial {item.trial}: {metric} {item.score:.6g}"
        + ("" if item.gained is None else f", better by {item.gained:.3g}")
        + f" for {dollars(item.usd_since)}"
        for item in found
    ]
    return "\n".join(lines) or "none"


def trial_rows(space: "Space", trials: "Sequence[Trial]", sign: float, metric: str) -> list[dict[str, Any]]:
    """Return a row for each of the best trials, the best first, with its first values. Pure."""
    from dtrain_dagster.search.results import best_first

    rows = []
    for trial in best_first(trials, sign)[:MOST_ROWS]:
        score = trial.best(sign)
        row: dict[str, Any] = {
            "trial": trial.number,
            metric: "–" if score is None else f"{score:.6g}",
            "usd": round(trial.usd, 4),
            "evaluations": f"{len(trial.scores)}/{trial.of}",
        }
        shown = space.parameters[:MOST_PARAMETERS]
        values = {item.short_name: _in_short(trial.values.get(item.name, "–")) for item in shown}
        rows.append(row | {name: value for name, value in values.items() if name not in row})
    return rows


def _in_short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The walk forward: assets partitioned by test year. Each year is a training of its own, with its own dataset, plan,
budget and bill, on what came before the year; its figures, beside those of baselines that were fitted anew, go into
`walk_forward_report`.

The plan, the training and the bill are the graph's own assets, built once more for a pipeline with partitions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.common import LaunchpadOptions, best_rows, head_of_page, links, page_of, refusing_mistakes
from dtrain_dagster.assets.dataset import opened_engine, show_dataset
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.plan_options import TrainingOptions, with_checked_names, with_nodes_of_run
from dtrain_dagster.assets.planning import DESCRIPTION, plan_training
from dtrain_dagster.assets.training import FinishedJob
from dtrain_dagster.assets.walk_forward_gate import START, training_settings
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.data.prices import PricesRef
from dtrain_dagster.data.sharding import LEAST, BuiltDataset, DatasetParams
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, cluster_resource, project_resource
from dtrain_dagster.settings.environment import load_settings
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.graph_names import GraphNames
from dtrain_dagster.support.page_entries import fit_page, read_entries
from trainer.errors import DamagedError
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.registry.walk_forward import YearScores

YEAR_ASSETS = ("sharded_dataset", "cost_estimate", "trained_checkpoint", "cost_breakdown", "year_scores")
"""The assets of each test year, in the order in which they are made."""


class YearConfig(LaunchpadOptions):
    """The form of a sample and the years that validate, in the launchpad of a year's `sharded_dataset`."""

    window: int = Field(default=DatasetParams().window, ge=LEAST["window"])
    """The number of past days in a sample."""
    horizon: int = Field(default=DatasetParams().horizon, ge=LEAST["horizon"])
    """The number of days from a sample's last day to its target."""
    shards: int = Field(default=DatasetParams().shards, ge=LEAST["shards"])
    """The number of files that the rows are divided into."""
    valid_years: int = Field(default=2, ge=1)
    """The years before the test year in which the epoch is chosen; the training ends before them."""


class YearTrainingOptions(TrainingOptions):
    """The training of a year, its limits and its probe, in the launchpad."""

    warm_start: bool = False
    """Begin with the weights of the year before, which must have been trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedYear:
    """A finished test year, as the report reads it."""

    scores: "YearScores"
    job_id: str
    run_dir: str
    dataset_id: str
    usd: float
    """The dollars of its training over all launches, and of its probe."""
    price_words: str
    seconds: float
    """Wall seconds with nodes, over all launches."""
    is_warm: bool
    """Whether it began with the weights of the year before."""
    settings: Mapping[str, Any]
    """What a year has to have in common with the others: model, loss, training, sample and validation."""


def year_partitions(first: int, last: int | None) -> dg.TimeWindowPartitionsDefinition:
    """Return one partition for each test year, ``2000`` and so on. ``last``: None for the present year."""
    end = None if last is None else str(last + 1)
    return dg.TimeWindowPartitionsDefinition(
        cron_schedule="0 0 1 1 *", start=str(first), fmt="%Y", end=end, end_offset=0 if end else 1
    )


def build_year_dataset(pipeline: Pipeline, prices: dg.AssetKey) -> dg.AssetsDefinition:
    """Return the asset `sharded_dataset` of a walk forward: one dataset for each test year, all of the same prices."""
    names, options = pipeline.names, pipeline.options("sharded_dataset", YearConfig)

    @dg.asset(
        **pipeline.asset("sharded_dataset", "data") | {"ins": {"stock_prices": dg.AssetIn(key=prices)}},
        kinds={"parquet"},
        required_resource_keys={names.project},
        description="The dataset of a test year: earlier days are for training and validation, the year is for the "
        "test. Prices "
        "after the year are not read.",
    )
    def sharded_dataset(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
        stock_prices: PricesRef,
    ):  # no annotation, see assets.common
        """Build the dataset of the partition's year, unless it exists, and publish it for the nodes."""
        return shard_year(context, config, project_resource(context, names), stock_prices)

    return sharded_dataset


def shard_year(
    context: dg.AssetExecutionContext, config: YearConfig, project: ProjectResource, stock_prices: PricesRef
) -> dg.MaterializeResult:
    """Return the dataset of the partition's year, where the nodes read it."""
    from dtrain_dagster.data.errors import DataError
    from dtrain_dagster.data.year_split import YearSplit, build_year

    settings = load_settings()
    shape = DatasetParams(window=config.window, horizon=config.horizon, shards=config.shards)
    try:
        split = YearSplit(year=int(context.partition_key), valid_years=config.valid_years)
        with opened_engine(settings.data_engine) as engine:
            built = build_year(stock_prices, project.storage_uri, split, shape, settings.calendar, engine)
    except DataError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    return show_dataset(context, project, built, settings.data_engine)


def build_year_estimate(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `cost_estimate` of a walk forward: each year has its own plan, refused where it exceeds the
    budget."""
    kind = with_checked_names(YearTrainingOptions, pipeline.defaults.get("cost_estimate", {}))
    names, options = pipeline.names, pipeline.options("cost_estimate", kind)

    @dg.asset(
        **pipeline.asset("cost_estimate", "planning", inputs=("sharded_dataset",)),
        kinds={"python"},
        required_resource_keys=names.resources,
        description=DESCRIPTION,
    )
    def cost_estimate(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
        sharded_dataset: BuiltDataset,
    ):  # no annotation, see assets.common
        """Plan the training of the partition's year."""
        cluster = with_nodes_of_run(cluster_resource(context, names), config)
        project = project_resource(context, names)
        return plan_year(context, names, config, cluster, project, sharded_dataset)

    return cost_estimate


def plan_year(
    context: dg.AssetExecutionContext,
    names: GraphNames,
    config: YearTrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    dataset: BuiltDataset,
) -> dg.MaterializeResult:
    """Return the plan of the partition's year. Raise `dagster.Failure` where it exceeds a limit, or where the year
    before is wanted and missing."""
    from dtrain_dagster.assets.training_request import DatasetTraining

    if config.warm_start:
        year_before = str(int(context.partition_key) - 1)
        start = start_of(context.instance, names.key("trained_checkpoint"), year_before)
        config = config.model_copy(update={"more": {**config.more, **start}})
        context.log.info(f"warm start with the weights of {year_before}, {start['start_from']}")
    request = DatasetTraining(names, config, cluster, project, dataset)
    return plan_training(context, config, cluster, project, request)


def start_of(instance: dg.DagsterInstance, key: dg.AssetKey, year: str) -> dict[str, str]:
    """Return the fields of a training that begins with the latest weights of a test year. Raise `dagster.Failure` where
    that year was not trained, or its run directory is gone."""
    remedy = f"materialize the year {year} first, or switch warm_start off (launchpad of {key.to_user_string()})"
    wanted = dg.AssetRecordsFilter(asset_key=key, asset_partitions=[year])
    records = instance.fetch_materializations(wanted, limit=1).records
    made = records[0].asset_materialization if records else None
    if made is None:
        raise dg.Failure(f"warm_start: the year before, {year}, was not trained: {remedy}", allow_retries=False)
    run_dir = str(read_entries(made.metadata)["run_dir"])
    try:
        model = RunDir(run_dir).read_json("model/model.json")
    except (DamagedError, OSError) as error:
        raise dg.Failure(f"warm_start: {error}; {remedy}", allow_retries=False) from error
    if model is None:
        raise dg.Failure(f"warm_start: {run_dir} holds no model; {remedy}", allow_retries=False)
    return dict(zip(START, (run_dir, str(model["file_sha256"])), strict=True))


def build_year_scores(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `year_scores` of a walk forward: the year's daily figures, and those of its baselines."""
    names = pipeline.names
    inputs = ("sharded_dataset", "cost_estimate", "trained_checkpoint")

    @dg.asset(
        **pipeline.asset("year_scores", "reporting", inputs=inputs),
        kinds={"numpy"},
        required_resource_keys=names.resources,
        description="The model's likelihood on each day of the test year, and that of every baseline, fitted here on "
        "the year's own training days.",
    )
    def year_scores(
        context: dg.AssetExecutionContext,
        sharded_dataset: BuiltDataset,
        cost_estimate: TrainingPlan,
        trained_checkpoint: FinishedJob,
    ):  # no annotation, see assets.common
        """Judge the forecasts of the partition's year, day by day, against baselines."""
        cluster, project = cluster_resource(context, names), project_resource(context, names)
        return judge_year(
            int(context.partition_key), cluster, project, sharded_dataset, cost_estimate, trained_checkpoint
        )

    return year_scores


def judge_year(
    year: int,
    cluster: GPUClusterResource,
    project: ProjectResource,
    dataset: BuiltDataset,
    cost_estimate: TrainingPlan,
    job: FinishedJob,
) -> dg.MaterializeResult:
    """Return a finished year with its daily figures."""
    from dtrain_dagster.assets.common import plan_of
    from dtrain_dagster.costs.launches import sum_launches
    from dtrain_dagster.registry.year_scores import score_run

    rundir = RunDir(job.run_dir)
    plan = plan_of(rundir, cost_estimate)
    try:
        scores = score_run(year, rundir, dataset.shared_uri, dataset.dataset_id, project.cache_dir)
    except ValueError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    with refusing_mistakes():
        usage = cluster.manager().node_usage(job.job_id)
        usd = CostTracker(job.cluster_name, [*usage, *plan.probe_usage], plan.tier).total_usd
    found = TrainedYear(
        scores=scores,
        job_id=job.job_id,
        run_dir=job.run_dir,
        dataset_id=dataset.dataset_id,
        usd=usd,
        price_words=plan.price_words,
        seconds=sum_launches(usage, plan.tier).seconds,
        is_warm=plan.job["training"].get("start_from") is not None,
        settings=settings_of(plan, dataset.manifest()),
    )
    return dg.MaterializeResult(value=found, metadata=fit_page(year_page(found, project.job_url(job.job_id))))


def year_page(year: TrainedYear, job_url: str) -> dict[str, Any]:
    """Return the page of a finished year. ``job_url``: of its training on the dashboard."""
    from dtrain_dagster.registry.walk_forward import judge_years
    from dtrain_dagster.reports.small_pictures import small_ranks
    from trainer.evaluation.gate import is_beyond_chance

    document = judge_years([year.scores])
    judged, best = document["all"], document["best_baseline"]
    gains, verdict = judged["gains"], f"NLL {judged['nll']:.4f} in {year.scores.year}"
    if best:
        gain = gains[best]
        chance = (
            ""
            if gain["t"] is None
            else f" (t {gain['t']:.1f}{'' if is_beyond_chance(gain['t']) else ', within chance'})"
        )
        verdict += f": {gain['nats']:+.4f} nats over the best baseline, {best}{chance}"
    others = sorted(judged["baselines"].items(), key=lambda item: item[1])
    rows = [
        {
            "baseline": name,
            "nll": round(nll, 4),
            "model_gain": round(gains[name]["nats"], 4),
            "t": "–" if gains[name]["t"] is None else round(gains[name]["t"], 1),
        }
        for name, nll in others
    ]
    head = head_of_page(
        f"{verdict}; {dollars(year.usd)} ({year.price_words}).",
        small_ranks({"this model": judged["nll"], **judged["baselines"]}, "this model"),
        {
            "nll": round(judged["nll"], 6),
            f"gain_over_{best}": round(gains[best]["nats"], 6) if best else None,
            "cost_usd": round(year.usd, 6),
        },
    )
    rest: dict[str, Any] = {
        **({"baselines": best_rows(rows)} if rows else {}),
        **links(dashboard=job_url),
        "days": judged["days"],
        "windows": judged["windows"],
        "coverage_90": round(judged["coverage_90"], 4),
        **{f"gain_over_{name}": round(gain["nats"], 6) for name, gain in gains.items()},
        **{f"t_over_{name}": round(gain["t"], 2) for name, gain in gains.items() if gain["t"] is not None},
        "job_id": year.job_id,
        "run_dir": dg.MetadataValue.path(year.run_dir),
    }
    return page_of(head, rest)


def settings_of(plan: TrainingPlan, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a year has in common with the others of a walk forward. Its data and its start are its own. Pure."""
    train, valid = (int(manifest["splits"][name]["last"][:4]) for name in ("train", "valid"))
    return {
        **training_settings(plan),
        "window": manifest["window"],
        "horizon": manifest["horizon"],
        "valid_years": valid - train,
        "warm_start": plan.job["training"].get("start_from") is not None,
    }


def with_study(pipeline: Pipeline, partitions: dg.PartitionsDefinition, defaults: Mapping[str, Any]) -> Pipeline:
    """Return the pipeline of a graph's walk forward. ``defaults``: where launchpads begin besides those of the graph.
    Pure."""
    own = {name: value for name, value in pipeline.defaults.items() if name == "cost_estimate"}
    shape = {
        name: value
        for name, value in (pipeline.defaults.get("sharded_dataset") or {}).items()
        if name in YearConfig.model_fields
    }
    return replace(
        pipeline,
        names=pipeline.names.walk_forward,
        study_of=pipeline.names,
        partitions=partitions,
        defaults={
            "sharded_dataset": {**shape, **defaults["sharded_dataset"]},
            "cost_estimate": {**own.get("cost_estimate", {}), **defaults["cost_estimate"]},
        },
    )

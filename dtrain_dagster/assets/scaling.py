"""The asset `scaling_study`: how this training scales on this cluster, measured from one node to all, modelled
beyond."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.common import LaunchpadOptions, hardware_mark
from dtrain_dagster.assets.pipeline import STOCK, STUDIES, Pipeline
from dtrain_dagster.assets.provisioning import provision, queueing
from dtrain_dagster.assets.training import of_plan
from dtrain_dagster.costs.plan import TrainingPlan
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, cluster_resource, project_resource
from dtrain_dagster.settings.tiers import tier_of
from dtrain_dagster.support.page_entries import fit_page
from trainer.config import JobConfig, parse_job
from trainer.rundir import RunDir
from trainer.storage.open import open_storage

if TYPE_CHECKING:
    from dtrain_dagster.monitoring.scaling import Study
    from dtrain_dagster.monitoring.scaling_points import Mode

FOLDER = "studies"
"""The folder beside the jobs in which studies are kept."""
STEPS, LOG_EVERY = 96, 4


class ScalingOptions(LaunchpadOptions):
    """The node counts and steps of the measurements, in the launchpad."""

    nodes: list[int] = []
    """Node counts; empty: from one to the plan's number of nodes."""
    steps: int = Field(default=STEPS, ge=LOG_EVERY)
    """Optimizer steps of each short run."""


def build_scaling_study(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `scaling_study` of a graph, in a group of its own: it is not part of retraining."""
    options = pipeline.options("scaling_study", ScalingOptions)

    @dg.asset(
        **pipeline.asset("scaling_study", STUDIES, inputs=("sharded_dataset", "cost_estimate"))
        | {"group_name": pipeline.names.unique(STUDIES)},
        kinds={"python"},
        required_resource_keys=pipeline.names.resources,
        description=(
            "Weak and strong scaling of the planned training, measured by short runs on one node up to all. A model of "
            "it for up to 256 ranks is shown, with its error, only if it predicts a measured world that it has not "
            "seen. It runs trainings, so it is not part of the job `train`."
        ),
        check_specs=[
            dg.AssetCheckSpec(
                "model_predicts_what_it_has_not_seen",
                asset=pipeline.names.key("scaling_study"),
                description="Fitted without the largest world, the model meets its step. If it does not, no figures "
                "are given for more ranks than were measured.",
            )
        ],
    )
    def scaling_study(
        context: dg.AssetExecutionContext,
        config: options,  # type: ignore[valid-type]
        sharded_dataset: BuiltDataset,
        cost_estimate: TrainingPlan,
    ):  # no annotation, see assets.common
        """Measure weak and strong scaling with short runs, fit a model to them, and check it on a world that it has not
        seen."""
        cluster, project = cluster_resource(context, pipeline.names), project_resource(context, pipeline.names)
        return study_scaling(context, config, cluster, project, sharded_dataset.samples, cost_estimate)

    return scaling_study


scaling_study = build_scaling_study(STOCK)


def study_scaling(
    context: dg.AssetExecutionContext,
    config: ScalingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    samples: Mapping[str, int],
    plan: TrainingPlan,
) -> dg.MaterializeResult:
    """Return the study of a plan's training. ``samples``: of each split."""
    from dtrain_dagster.assets.scaling_page import scaling_page
    from dtrain_dagster.dashboard.job_groups import group_page
    from dtrain_dagster.monitoring import scaling, scaling_points
    from dtrain_dagster.planning import probe

    counts = sorted(set(config.nodes)) or list(range(1, plan.node_count + 1))
    if counts[0] < 1 or counts[-1] > plan.node_count or config.steps < 3 * LOG_EVERY:
        raise dg.Failure(
            f"scaling_study: nodes = {config.nodes} and steps = {config.steps} cannot be measured; nodes go from 1 to "
            f"{plan.node_count} (those of the plan), steps from {3 * LOG_EVERY}",
            allow_retries=False,
        )
    cluster = of_plan(cluster, plan)
    manager = cluster.manager(context.run.run_id)
    got = provision(context, manager, cluster, project, plan.sku, plan.node_count)
    usd_per_node_hour = price_of(got.gpu_type).usd_per_hour(tier_of(got.tier or plan.tier))
    mark = plan.fingerprint + hardware_mark(cluster, got.gpu_type)
    runs = short_runs(counts, plan.job["training"]["gradient_accumulation_steps"])
    uneven = [count for count in counts[:-1] if ("strong", count) not in runs]
    if uneven:
        context.log.warning(
            f"no strong scaling for {uneven} node(s): the step of {counts[-1]} cannot be shared out evenly among "
            "them; choose another gradient_accumulation_steps"
        )
    points, is_this_machine = [], cluster.traits.is_this_machine
    for mode, nodes in runs:
        job = short_job(plan, project.jobs_uri, mark, mode, nodes, counts[-1], config.steps, is_this_machine)
        context.log.info(f"{mode} scaling, {nodes} node(s): job {job.job_id}")
        with queueing(context, project, cluster):
            env, command = cluster.node_env(project), plan.command
            probe.run_probe(manager, job, nodes, plan.processes_per_node, env, context.log.info, command)
        rundir = RunDir(job.run_dir)
        events, _ = probe.of_last_launch(list(rundir.events()), rundir.nodes())
        point = scaling_points.read_point(
            events, mode, nodes, asdict(job.training), samples["train"], usd_per_node_hour
        )
        context.log.info(f"{point.step_seconds * 1000:.1f} ms a step, {point.samples_per_second:,.0f} samples/s")
        points.append(point)
    points.append(replace(points[len(counts) - 1], mode="strong"))  # with all nodes the two are one and the same
    # Local nodes share this machine: more of them than cores is a shortage of cores, not a cost of distribution.
    cores = (os.cpu_count() or 1) / (job.training.threads_per_rank or 1) if is_this_machine else None
    study = scaling.study(points, cores)
    folder = f"{project.shared_uri}/{FOLDER}"
    text = json.dumps(scaling.scaling_document(study), allow_nan=False)
    open_storage(folder).write(f"{mark}.json", text.encode())
    addresses = {"dashboard": group_page(project.dashboard_url, mark, "scaling study")}
    return dg.MaterializeResult(
        metadata=fit_page(scaling_page(study, folder, mark, uneven, addresses)),
        check_results=[model_check(study)],
    )


def short_runs(counts: Sequence[int], accumulation: int) -> "list[tuple[Mode, int]]":
    """Return the (mode, nodes) pairs to measure with these node counts. Strong scaling has only counts that divide
    the largest count's step evenly: a smaller step would not be the same work. With all nodes both modes are the
    same run."""
    runs: list[tuple[Mode, int]] = [("weak", count) for count in counts]
    return runs + [("strong", count) for count in counts[:-1] if accumulation * counts[-1] % count == 0]


def short_job(
    plan: TrainingPlan, jobs_uri: str, mark: str, mode: "Mode", nodes: int, most: int, steps: int,
    shares_machine: bool,
) -> JobConfig:  # fmt: skip
    """Return the planned training, cut to ``steps`` and ``nodes``. Weak: each rank does what it would do in the
    plan. Strong: the step of ``most`` nodes is shared by fewer. ``mark`` names the training and its hardware in the
    job's id."""
    training = dict(plan.job["training"])
    if mode == "strong":
        training["gradient_accumulation_steps"] = training["gradient_accumulation_steps"] * most // nodes
    training["world_size"] = nodes * plan.processes_per_node
    if shares_machine and training.get("threads_per_rank") is None:
        training["threads_per_rank"] = 1  # else one node alone gets all cores, and two half of them each
    training |= {
        "max_steps": steps,
        "eval_frequency": steps,
        "checkpoint_frequency": steps,
        "log_frequency": LOG_EVERY,
    }
    job_id = f"scaling-{mark}-{mode}-{nodes}of{most}-{steps}"
    fields = {"job_id": job_id, "run_dir": f"{jobs_uri}/{job_id}", "tracking": {"tensorboard": False}}
    return parse_job(json.dumps({**plan.sections, "training": training, **fields}), source="the plan")


def model_check(study: "Study") -> dg.AssetCheckResult:
    """Return the check that the model predicts the world that it was not fitted on."""
    from dtrain_dagster.monitoring.scaling import TOLERANCE

    metadata: dict[str, Any] = {"why": study.withheld} if study.withheld else {}
    if study.error is not None:
        metadata |= {"error": abs(study.error), "limit": TOLERANCE}
    return dg.AssetCheckResult(
        check_name="model_predicts_what_it_has_not_seen",
        passed=not study.withheld,
        severity=dg.AssetCheckSeverity.WARN,
        metadata=metadata,
    )

"""The asset of a program of a user's own: a script under torchrun, Horovod, DeepSpeed, Ray Train or TensorFlow.

It is run on the cluster and followed as a training is: terminating the run cancels its job, and a run that dies leaves
it going, to be found again. What it trains is not known here, so nothing is planned, checked or registered. A script
that calls `trainer.Trainer.fit` has a whole graph instead (`dtrain_dagster.pipelines`).
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.assets.cluster_run import ClusterRun
from dtrain_dagster.assets.common import (
    LaunchpadOptions,
    head_of_page,
    links,
    page_of,
    refusing_mistakes,
)
from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.training_progress import follow, log_of, observe, paid
from dtrain_dagster.clusters.base import GPUClusterManager
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.jobs.program import has_gpus, order_program, processes_of, refuse_program
from dtrain_dagster.jobs.progress import describe_wait
from dtrain_dagster.jobs.spending import Wanted, note_attached
from dtrain_dagster.planning.projection import count_nodes
from dtrain_dagster.resources import GPUClusterResource, ProjectResource, cluster_resource, project_resource
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.support.formatting import dollars, format_duration, in_block
from dtrain_dagster.support.page_entries import fit_page
from dtrain_dagster.support.user_code import digest_sources
from dtrain_dagster.support.user_sources import script_sources
from trainer.frameworks.catalogue import FRAMEWORKS, TORCHRUN
from trainer.rundir import RunDir

PROGRAM = "program_run"


Engine = StrEnum("Engine", {name: name for name in FRAMEWORKS})  # type: ignore[misc]
"""What a program is written for, as the launchpad offers it."""


class ProgramOptions(LaunchpadOptions):
    """How the program is run."""

    engine: Engine = Engine(TORCHRUN)
    """What the script is written for: it is started once per process with torchrun's variables, and those of Horovod,
    DeepSpeed or TensorFlow; for Ray once, beside a Ray of all nodes."""
    nodes: int | None = Field(default=None, ge=1)
    """Nodes; None: DTRAIN_NODES."""
    processes_per_node: int | None = Field(default=None, ge=1)
    """Processes on each node; None: DTRAIN_PROCESSES_PER_NODE, else one per GPU, and one for Ray and TensorFlow."""
    arguments: list[str] = []
    """The arguments of the script."""


def build_program_run(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Return the asset `program_run` of a graph with a script."""
    names = pipeline.names
    options = pipeline.options(PROGRAM, ProgramOptions)

    @dg.asset(
        key=names.key(PROGRAM),
        group_name=names.pipeline,
        owners=list(pipeline.owners),
        kinds={"python"},
        required_resource_keys=names.resources,
        deps=[names.key("gpu_cluster"), *pipeline.deps],
        description=(
            f"{Path(pipeline.script).name}, run on the cluster's nodes by its engine. Terminating the run cancels the "
            "job; if the run dies, the job goes on and is found again."
        ),
    )
    def program_run(context: dg.AssetExecutionContext, config: options):  # type: ignore[valid-type]
        """Run the script on the cluster, or attach to the job that already does, and follow it to its end."""
        return run_program(
            context, cluster_resource(context, names), project_resource(context, names), pipeline, config
        )

    return program_run


def run_program(
    context: dg.AssetExecutionContext,
    cluster: GPUClusterResource,
    project: ProjectResource,
    pipeline: Pipeline,
    config: ProgramOptions,
) -> dg.MaterializeResult:
    """Return what became of the program. Raise `dagster.Failure` where it cannot be started, or fails."""
    nodes = config.nodes or cluster.node_count
    with refusing_mistakes():
        processes = processes_of(config.engine, config.processes_per_node, cluster.ranks_per_node)
        gpus = has_gpus(cluster.traits, cluster.gpu_type, cluster.engine.get("gpus", 0))
        refuse_program(config.engine, cluster.traits, processes, gpus)
        run = ClusterRun.of(context, cluster, project)
        manager, command = run.manager, [sys.executable, pipeline.script, *config.arguments]
        digest = pipeline.names.mark(digest_program(config, nodes, processes, pipeline.script))
        job_id = choose_program_job(manager, digest, context.run.root_run_id or context.run.run_id)
        rundir, env = RunDir(f"{project.jobs_uri}/{job_id}"), cluster.node_env(project)
        size = (nodes, processes)
        spec = order_program(manager, cluster.traits, job_id, rundir.uri, config.engine, command, *size, env)
    got = run.provision(cluster.sku, nodes)
    tier = tier_of(got.tier or cluster.first_tier)
    with run.owning(rundir, job_id):
        wanted = Wanted(job_id, usd_per_hour=nodes * price_of(got.gpu_type).usd_per_hour(tier))
        runs = job_id in {status.job_id for status in manager.active_jobs()}
        with run.queueing():
            with refusing_mistakes(), nullcontext() if runs else run.promising(wanted):
                note_attached(manager.home, job_id)
                manager.submit_job(spec)
            for status, _, is_due in follow(run, rundir, job_id, tier, cache(lambda: run.leave_queue(got))):
                if is_due and not status.state.is_final:
                    found: dict[str, Any] = {"phase": str(status.state), "nodes_alive": status.nodes_alive}
                    found |= paid(manager, job_id, tier)
                    observe(context, found | ({"waiting": waiting} if (waiting := describe_wait(status)) else {}))
    page = program_page(rundir, config, *size, paid(manager, job_id, tier), project.job_url(job_id))
    log = {"log": dg.MarkdownMetadataValue(in_block(log_of(manager, job_id)))}
    return dg.MaterializeResult(
        data_version=dg.DataVersion(job_id), metadata=fit_page({**page, **log, **run.attempts()})
    )


def program_page(
    rundir: RunDir, config: ProgramOptions, nodes: int, processes: int, totals: Mapping[str, Any], job_url: str
) -> dict[str, Any]:
    """Return the page of a program that has ended well. ``processes``: on each node; ``totals``: of `paid`."""
    took = f" in {format_duration(totals['wall_seconds'])}" if "wall_seconds" in totals else ""
    cost = f", {dollars(totals['cost_usd'])}" if "cost_usd" in totals else ""
    head = head_of_page(
        f"The program succeeded on {count_nodes(nodes)}{took}{cost}.",
        "",
        {name: totals.get(name) for name in ("wall_seconds", "node_hours", "cost_usd")},
    )
    rest: dict[str, Any] = {
        **links(dashboard=job_url),
        "run_dir": dg.MetadataValue.path(rundir.uri),
        "job_id": rundir.uri.rsplit("/", 1)[-1],
        "engine": config.engine.value,
        "processes": nodes * processes,
        **totals,
    }
    return page_of(head, rest)


def digest_program(config: ProgramOptions, nodes: int, processes: int, script: str) -> str:
    """Return what tells runs of a program apart: twelve hex digits over its source, the user's modules that it imports,
    its arguments, engine and size."""
    told = [digest_sources(script_sources(Path(script))), config.engine.value, nodes, processes, *config.arguments]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def choose_program_job(manager: GPUClusterManager, digest: str, root_run_id: str) -> str:
    """Return the id of the job: that of a job of the same program that still runs, whose run has died, else this run's
    own, which a retry has as well."""
    running = [status.job_id for status in manager.active_jobs() if status.job_id.startswith(f"program-{digest}-")]
    own = f"program-{digest}-{root_run_id[:8]}"
    return own if own in running or not running else running[0]

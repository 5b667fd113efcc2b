"""What a trial takes, measured before the first one by a short run of the job that is varied, or read from a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from dtrain_dagster.clusters.base import GPUClusterManager
from dtrain_dagster.costs.estimate import LearnedCorrection, Parts, Sizes
from dtrain_dagster.costs.tracker import CostTracker
from dtrain_dagster.planning.build_plan import sizes_of
from dtrain_dagster.planning.history import pace_mark
from dtrain_dagster.planning.probe import forecast
from dtrain_dagster.search.run import SearchRequest
from dtrain_dagster.search.trials import TrialSeconds


def measure_trial(
    manager: GPUClusterManager, request: SearchRequest, env: Mapping[str, str], is_this_machine: bool,
    told: Callable[[str], object] = lambda sentence: None,
) -> tuple[TrialSeconds, float]:  # fmt: skip
    """Return what a trial takes in node-seconds, and the dollars that finding it out has cost: a probe, as a plan runs
    one, on the least nodes of a trial. It is not run again where one of this job was before, and then costs nothing.
    Raise as `dtrain_dagster.planning.probe.run_probe` does."""
    nodes, ranks = request.least_nodes, request.processes_per_node
    sizes = trial_sizes(request, os.cpu_count() if is_this_machine else None)
    mark = f"{pace_mark(request.base, ranks)}-w{request.base.training.world_size}-{request.name}"
    most = None if request.budget_usd is None else request.budget_usd / request.usd_per_node_hour * 3600
    found = forecast(
        manager, request.base, sizes, (nodes,), mark, dict(env), LearnedCorrection(), told, left=lambda: most
    )
    usage = [item for job_id in found.rests_on for item in manager.node_usage(job_id)]
    usd = CostTracker("", usage, request.tier).total_usd
    return seconds_of_parts(found.parts(nodes), nodes, sizes.work(nodes).evaluations), usd


def seconds_of_parts(parts: Parts, nodes: int, evaluations: int) -> TrialSeconds:
    """Return the node-seconds of a trial from the seconds of its phases on this many nodes. Pure."""
    return TrialSeconds(
        startup=nodes * parts.startup,
        training=nodes * (parts.steps + parts.evaluation + parts.checkpoint),
        of=max(1, evaluations),
        finish=nodes * parts.finish,
    )


def trial_sizes(request: SearchRequest, cores: int | None) -> Sizes:
    """Return how much the job that is varied has to do. ``cores``: of the one machine of all nodes, see `Sizes`."""
    sizes = sizes_of(request.base, request.samples, request.processes_per_node, cores)
    return replace(sizes, stated_ranks=request.base.training.world_size)

"""The start of a job on its cluster, and what tells one training from another.

Its order is kept first (`jobs.orders`), so that nothing which nodes write decides what is registered in the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache

from dtrain_dagster.clusters.base import ClusterError, GPUClusterManager, JobSpec
from dtrain_dagster.costs.plan import is_spent, write_limit
from dtrain_dagster.jobs.orders import keep_order
from dtrain_dagster.jobs.spending import note_start
from dtrain_dagster.support.user_code import digest_sources, digest_user_code, trainer_sources
from dtrain_dagster.support.user_sources import StagingError
from trainer.config import PARTS, JobConfig
from trainer.differences import list_differences
from trainer.model.allowed_factories import refuse_foreign_factories
from trainer.rundir import JOB, LAUNCH, LIMIT, RESULT, RunDir
from trainer.runtime.launch import with_order

BUDGET = "max_node_seconds"
"""Key in ``training`` that a person may raise to continue a job. It decides when the job stops, not its result."""


class BudgetSpentError(ClusterError):
    """A job has no budget left. The message says how much was paid."""


def start_job(
    manager: GPUClusterManager,
    job: JobConfig,
    node_count: int,
    processes_per_node: int,
    env: dict[str, str],
    stop_at_usd: float | None = None,
    command: tuple[str, ...] | None = None,
    part_of: str = "",
    keep_failed_seconds: float = 0.0,
) -> None:
    """Write ``job.json`` and run the trainer on the cluster, or a ``command`` that trains the job. A job that runs
    already is left alone, except for its budget. ``command``: Python, a script, its arguments. ``stop_at_usd``: of what
    ``max_node_seconds`` was computed. ``part_of``: the fleet or search that pays for it.
    ``keep_failed_seconds``: how long a node that fails is left in place. Raise `BudgetSpentError`, and
    buy nothing, where no budget is left."""
    refuse_foreign_factories(job)
    rundir = RunDir(job.run_dir)
    known, limit = rundir.read_json(JOB), job.training.max_node_seconds
    stopped_at = (rundir.read_json(LIMIT) or {}).get("max_node_seconds") if ran_out(rundir) else None
    there = None if known is None else rundir.read_job()
    keep_order(manager.home, job, there)
    if known is None or there is None:
        rundir.write_job(job)
    elif changed := list_differences(asdict(there.training), asdict(job.training)):  # as a person has changed them
        fields = {name.partition(".")[0] for name in changed}
        now = {name: value for name, value in asdict(job.training).items() if name in fields}
        rundir.write_json(JOB, known | {"training": known["training"] | now})
    spent = sum(node.seconds(node.last_seen_at or node.started_at) for node in rundir.nodes()) if limit else 0.0
    refused = limit is not None and is_spent(limit, spent, stopped_at)
    if not (refused and stopped_at):  # a job that stays stopped keeps on record where it stopped
        write_limit(rundir, limit, stop_at_usd)
    if limit is not None and refused:
        raise BudgetSpentError(
            f"job {job.job_id} was paid {spent / 3600:.4g} node-hours, its budget is {limit / 3600:.4g} "
            f"(training.{BUDGET} = {limit:g}): raise it to go on"
        )
    note_start(manager.home, job.job_id, part_of)
    spec = spec_of(manager, job, node_count, processes_per_node, env, command, keep_failed_seconds)
    manager.submit_job(spec)


def spec_of(
    manager: GPUClusterManager,
    job: JobConfig,
    node_count: int,
    processes_per_node: int,
    env: Mapping[str, str],
    command: tuple[str, ...] | None = None,
    keep_failed_seconds: float = 0.0,
) -> JobSpec:
    """Return what a cluster is asked to run for a training, or for a ``command`` that trains it. Pure."""
    trainer = (manager.python, "-m", "trainer", "--config", f"{job.run_dir}/job.json")
    return JobSpec(
        job_id=job.job_id,
        run_dir=job.run_dir,
        command=command or trainer,
        script=command[1] if command else "",
        node_count=node_count,
        processes_per_node=processes_per_node,
        master_port=job.training.master_port,
        env=with_order(env, run_dir=job.run_dir) if command else {**env},
        keep_failed_seconds=keep_failed_seconds,
        elastic=True,
    )


def ran_out(rundir: RunDir) -> bool:
    """Return whether the last launch stopped at its hard budget."""
    result, launch = rundir.read_json(RESULT) or {}, rundir.read_json(LAUNCH) or {}
    return result.get("status") == "budget" and result.get("launch") in (None, launch.get("launch"))


def fingerprint(job: JobConfig, node_count: int, processes_per_node: int, script: str = "") -> str:
    """Return eight hex digits over what decides the result: data, model, loss, training, code (a script's), ranks."""
    named = [getattr(job, part) for part in PARTS]
    own = [config.factory for config in named if config is not None]
    what = {
        "dataset": job.dataset.dataset_id or job.dataset.uri,
        "training": {name: value for name, value in asdict(job.training).items() if name != BUDGET},
        "code": [code_version(), *map(_own_digest, own), *filter(None, [script])],
        "ranks": [node_count, processes_per_node],
    }
    what |= {part: asdict(config) for part, config in zip(PARTS, named, strict=True) if config is not None}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:8]


@cache
def code_version() -> str:
    """Return twelve hex digits over the source of the `trainer` package, the code that runs on the nodes."""
    return digest_sources(trainer_sources())


def _own_digest(factory: str) -> str:
    """Return what tells versions of a user's factory apart; "" where its sources are not found."""
    try:
        return digest_user_code(factory)
    except StagingError:
        return ""  # the start of the job says why

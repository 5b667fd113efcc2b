"""From the options of `dtrain` to the job that it runs: pure, but for looking at what is there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from dtrain_dagster.settings import Settings
from trainer.config import ConfigError, JobConfig, parse_job
from trainer.rundir import RunDir
from trainer.storage import Storage


def read_config(path: str) -> str:
    """The text of a job.json."""
    folder, _, file = path.rpartition("/")
    try:
        return Storage(folder or ".").read(file).decode()
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file") from None


def dataset_config(settings: Settings, dataset: str) -> str:
    """A job.json that trains on a dataset, given by its folder, its id, or as ``latest``: the one built last."""
    datasets = f"{settings.storage_uri}/datasets"
    if dataset == "latest":
        dataset = _latest_dataset(datasets)
    for uri in (os.path.abspath(dataset) if "://" not in dataset else dataset, f"{datasets}/{dataset}"):
        if Storage(uri).exists("manifest.json"):
            return json.dumps({"dataset": {"uri": uri}})
    known = ", ".join(Storage(datasets).list()) or "none yet; `make run` builds one"
    raise ConfigError(
        f"--dataset {dataset}: no folder with a manifest.json, and no id of a dataset in {datasets} ({known})"
    )


def _latest_dataset(datasets: str) -> str:
    storage = Storage(datasets)
    built = [
        (datetime.fromisoformat(json.loads(storage.read(f"{name}/manifest.json"))["created_at"]), name)
        for name in storage.list()
        if storage.exists(f"{name}/manifest.json")
    ]
    if not built:
        raise ConfigError(f"--dataset latest: there is no dataset in {datasets} yet; `make run` builds one")
    return f"{datasets}/{max(built)[1]}"


def plan_job(
    text: str, source: str, overrides: Sequence[str], nodes: int | None, processes_per_node: int, settings: Settings
) -> tuple[JobConfig, int]:
    """The job to run and the number of its nodes.

    The planned world size follows the nodes that are asked for; where none are, a job.json that states its world size
    is taken at its word. A job that is there already is gone on with as it was planned, on as many nodes as are asked
    for now: its batches are dealt anew. `ConfigError` where it was planned otherwise.
    """
    first = parse_job(text, [*overrides, 'run_dir="(to be set)"'], source)
    stated = "world_size" in json.loads(text).get("training", {})
    if nodes is None and stated:
        nodes, rest = divmod(first.training.world_size, processes_per_node)
        if rest:
            raise ConfigError(
                f"{source}: training.world_size = {first.training.world_size} is no multiple of {processes_per_node} "
                "processes per node; give --nodes and --procs-per-node"
            )
    nodes = nodes or settings.nodes
    ranks = nodes * processes_per_node
    own = any(override.startswith("training.world_size=") for override in overrides)
    training = replace(
        first.training,
        world_size=first.training.world_size if own else ranks,
        threads_per_rank=first.training.threads_per_rank
        or settings.threads_per_rank
        or max(1, (os.cpu_count() or 1) // ranks),
    )
    job = replace(first, run_dir=f"{settings.jobs_uri}/{first.job_id}", training=training)
    rundir = RunDir(job.run_dir)
    if not rundir.storage.exists("job.json"):
        return job, nodes
    before = rundir.read_job()
    same = replace(training, world_size=before.training.world_size, threads_per_rank=before.training.threads_per_rank)
    if replace(job, training=same) != before:
        raise ConfigError(
            f"job {job.job_id} was planned with another configuration: choose another --name, or repeat it"
        )
    return before, nodes


def total_steps(job: JobConfig) -> int:
    """Optimizer steps that the training will take. `ConfigError` where the data cannot feed its ranks."""
    from trainer.sampler import steps_per_epoch  # numpy, not needed for the rest

    try:
        manifest = json.loads(Storage(job.dataset.uri).read("manifest.json"))
    except FileNotFoundError:
        raise ConfigError(f"dataset.uri = {job.dataset.uri!r}: there is no manifest.json in it") from None
    training = job.training
    per_epoch = steps_per_epoch(manifest["samples"]["train"], training.global_batch_size, training.micro_batches)
    steps = per_epoch * training.epochs
    return steps if training.max_steps is None else min(steps, training.max_steps)


def runnable(command: Sequence[str]) -> tuple[str, ...]:
    """The command as it will be run; `ConfigError` if its program or script is not there."""
    program = command[0]
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise ConfigError(f"there is no script {program!r} in {os.getcwd()}")
        return (sys.executable, *command)
    if shutil.which(program):
        return tuple(command)
    if program in ("python", "python3"):
        return (sys.executable, *command[1:])
    raise ConfigError(f"there is no program {program!r} on the PATH; to run a Python script: python {program}…")


def job_environment(settings: Settings) -> dict[str, str]:
    """What the processes get besides the shell's variables: the working directory's modules and the shard cache."""
    paths = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "DTRAIN_CACHE": str(settings.cache_dir)}

"""A training that is asked for: of a dataset, as the launchpad describes it, or of a script, as it describes itself.

What it costs, and whether it may begin, is decided in `dtrain_dagster.assets.planning`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import dagster as dg

from dtrain_dagster.assets.plan_options import ScriptOptions, TrainingOptions
from dtrain_dagster.data.sharding import BuiltDataset
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.support.graph_names import GraphNames
from trainer.config import JobConfig, parse_job
from trainer.data.manifest import kind_of
from trainer.model.allowed_factories import refuse_foreign_factories, usual_parts
from trainer.rundir import resolve_start

if TYPE_CHECKING:
    from dtrain_dagster.jobs.script_job import ScriptJob
    from dtrain_dagster.planning.check_job import Checked


@dataclass(frozen=True, slots=True)
class Wanted:
    """A training on a number of nodes, before its speed is known."""

    job: JobConfig
    samples: Mapping[str, int]
    """The number of samples of each split."""
    script: ScriptJob | None = None
    """The script that trains; None where the trainer does by itself."""


class TrainingRequest(Protocol):
    """A training that is asked for."""

    @property
    def names(self) -> GraphNames:
        """The names of its graph."""

    def on_nodes(self, node_count: int) -> Wanted:
        """Return the training as it would run on ``node_count`` nodes. Raise `ConfigError` where it cannot."""

    def check(self, job: JobConfig, ranks: int, hosts: int, rehearses: bool) -> Checked:
        """Check that nodes on this many ``hosts`` could train this job, and return what is known of it then.
        Raise `ConfigError` or `DatasetError` where they could not."""


@dataclass(frozen=True, slots=True)
class DatasetTraining:
    """A training of a model and a loss of the launchpad on a dataset."""

    names: GraphNames
    config: TrainingOptions
    cluster: GPUClusterResource
    project: ProjectResource
    dataset: BuiltDataset

    def on_nodes(self, node_count: int) -> Wanted:
        """Return the training as it would run on ``node_count`` nodes."""
        config = with_usual_parts(self.config, self.dataset.manifest())
        job = job_on(node_count, config, self.cluster, self.project, self.dataset)
        return Wanted(job, self.dataset.samples)

    def check(self, job: JobConfig, ranks: int, hosts: int, rehearses: bool) -> Checked:
        """Check data, model and loss, as `dtrain_dagster.planning.check_job.check_job` does."""
        from dtrain_dagster.planning.check_job import check_job, check_strategy

        has_gpus, is_here = self.cluster.have_gpus, self.cluster.traits.is_this_machine
        said = check_strategy(job.training, hosts, has_gpus, is_here)
        checked = check_job(job, ranks, rehearses, hosts, has_gpus)
        return replace(checked, sentences=(*said, *checked.sentences))


@dataclass(frozen=True, slots=True)
class ScriptTraining:
    """The training of a script that calls `trainer.Trainer.fit`."""

    names: GraphNames
    config: ScriptOptions
    cluster: GPUClusterResource
    project: ProjectResource
    script: str

    def on_nodes(self, node_count: int) -> Wanted:
        """Return the training as it would run on ``node_count`` nodes, which the script says."""
        from dtrain_dagster.jobs.script_job import describe_script

        ranks, is_here = node_count * self.cluster.ranks_per_node, self.cluster.traits.is_this_machine
        share = max(1, (os.cpu_count() or 1) // ranks) if is_here else None
        overrides = self.config.overrides(ranks, self.cluster.threads_per_rank or share)
        found = describe_script(
            self.script, self.config.arguments, overrides, "plan", f"{self.project.jobs_uri}/plan",
            self.project.trainer_env(),
        )  # fmt: skip
        return Wanted(found.job, found.samples, found)

    def check(self, job: JobConfig, ranks: int, hosts: int, rehearses: bool) -> Checked:
        """Return what could not be checked of its strategy: `on_nodes` has run the script up to its first batch. Raise
        `ConfigError` where the encryption that it requires cannot be had, or a package is missing."""
        from dtrain_dagster.planning.check_job import Checked, check_strategy
        from trainer.comm.encryption import refuse_nccl

        refuse_nccl(job.training, hosts, self.cluster.have_gpus)
        is_here = self.cluster.traits.is_this_machine
        return Checked(tuple(check_strategy(job.training, hosts, self.cluster.have_gpus, is_here)))


def with_usual_parts(config: TrainingOptions, manifest: Mapping[str, Any]) -> TrainingOptions:
    """Return the options with the usual model and loss of this kind of dataset, where nobody has stated others. Raise
    ValueError for an unknown kind. Pure."""
    stated = config.stated()
    parts = usual_parts(kind_of(manifest), manifest.get("task"), has_own_model="model" in stated)
    usual = zip(("model", "loss"), parts, strict=True)
    return config.model_copy(update={name: part for name, part in usual if name not in stated})


def job_on(
    node_count: int,
    config: TrainingOptions,
    cluster: GPUClusterResource,
    project: ProjectResource,
    dataset: BuiltDataset,
) -> JobConfig:
    """Return the training as it would run on ``node_count`` nodes. A file's settings are part of it and of its
    fingerprint."""
    training = config.training(node_count * cluster.ranks_per_node, cluster.threads_per_rank)
    sections: dict[str, Any] = {
        "dataset": {"uri": dataset.shared_uri, "dataset_id": dataset.dataset_id},
        "model": {"factory": config.model, "args": config.model_args},
        "loss": {"factory": config.loss, "args": config.loss_args},
        "training": training,
    }
    place = {"job_id": "plan", "run_dir": f"{project.jobs_uri}/plan"}
    job = job_config(sections, **place)
    if not config.settings_file:
        return job
    from dtrain_dagster.planning.tuned_settings import read_tuned

    own = {"threads_per_rank"} if cluster.threads_per_rank else set()  # DTRAIN_THREADS_PER_RANK
    found = read_tuned(config.settings_file)
    tuned, words = found.settings_for(job, config.stated() | own)
    for sentence in words:
        dg.get_dagster_logger().warning(sentence)
    return job_config({**sections, **found.parts_for(job), "training": {**training, **tuned}}, **place)


def job_config(sections: dict[str, Any], **fields: Any) -> JobConfig:
    """Return a checked `JobConfig`. `trainer.config.ConfigError` names each launchpad field that cannot be used, and
    the setting that would allow a model or loss of the user's own."""
    job = parse_job(json.dumps({**sections, **fields}), source="launchpad")
    refuse_foreign_factories(job)
    return resolve_start(job)

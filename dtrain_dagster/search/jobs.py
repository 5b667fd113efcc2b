"""The job of a trial: the job that a search varies, with the trial's values in it, sized for a fleet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtrain_dagster.fleet.jobs import FleetJob, JobOrder
from dtrain_dagster.planning.build_plan import sizes_of
from dtrain_dagster.search.check_space import job_of_trial
from dtrain_dagster.search.costing import TrialSeconds
from dtrain_dagster.search.source import TrialJob
from dtrain_dagster.search.space import Space
from trainer.config import JobConfig


def trial_id(search: str, number: int) -> str:
    """Return the id of the job of a trial."""
    return f"{search}-{number:04d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJobs:
    """Makes the jobs of one search."""

    name: str
    """The name of the search, with which ids of its jobs begin."""
    space: Space
    base: JobConfig
    """The job that is varied. Its world size may be that of more nodes than a trial has: its batches stay the same."""
    jobs_uri: str
    samples: Mapping[str, int]
    """Samples of each split."""
    least_nodes: int
    most_nodes: int
    processes_per_node: int

    def __call__(self, number: int, values: Mapping[str, Any], usual: TrialSeconds) -> TrialJob:
        """Return the job of a trial. Raise `ConfigError` for values that do not go together."""
        job_id = trial_id(self.name, number)
        job = job_of_trial(self.base, self.space, values, f"trial {number}")
        job = replace(job, job_id=job_id, run_dir=f"{self.jobs_uri}/{job_id}")
        of = self.evaluations_of(job)
        fleet_job = FleetJob(
            job_id=job_id,
            least_nodes=self.least_nodes,
            most_nodes=self.most_nodes,
            node_seconds=max(1.0, usual.evaluation * of + usual.finish),
            startup_seconds=usual.startup,
            order=JobOrder(job=job),
        )
        return TrialJob(job=fleet_job, of=of)

    def evaluations_of(self, job: JobConfig) -> int:
        """Return how often a job is evaluated if it goes to its end."""
        sizes = replace(
            sizes_of(job, self.samples, self.processes_per_node, None), stated_ranks=job.training.world_size
        )
        return max(1, sizes.work(self.most_nodes).evaluations)

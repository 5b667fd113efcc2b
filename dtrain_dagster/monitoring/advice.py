"""Is the cluster idle? A pure function from facts to a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain_dagster.clusters.base import ClusterHealth, JobStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleDecision:
    idle_seconds: float
    """Since the last job ended; 0 while one runs or while there are no nodes."""
    scale_down: bool


def decide_idle(
    health: ClusterHealth, jobs: Sequence[JobStatus], ready_since: float, now: float, limit_seconds: float
) -> IdleDecision:
    """Has the cluster stood ready without work for longer than the limit (R1.2)?

    ``ready_since``: Unix seconds of when the cluster was first seen ready; counts where no job has run since.
    """
    if not health.nodes or health.running_jobs:
        return IdleDecision(idle_seconds=0.0, scale_down=False)
    last_end = max((job.ended_at for job in jobs if job.ended_at is not None), default=0.0)
    idle = max(0.0, now - max(last_end, ready_since))
    return IdleDecision(idle_seconds=idle, scale_down=idle > limit_seconds)

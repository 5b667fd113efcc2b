"""Eventual consistency: what was PUT is not there for everybody at once, and what is there may be 404 for a while.

Where that is known from is in `harness.azure.emulator.faults`, under ``hide``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.azure.emulator.answers import not_found
from harness.azure.emulator.state import Cloud

if TYPE_CHECKING:
    from harness.azure.emulator.jobs import Job


def is_hidden(cloud: Cloud, resource: str, name: str, created: float, by: str) -> bool:
    """Whether a job or compute is answered as if it were not there; ``by``: get, list, cancel, history."""
    now = cloud.clock.now()
    lag = {"get": cloud.timing.visible_seconds, "list": cloud.timing.listed_seconds}.get(by, 0.0)
    return now < created + lag or cloud.faults.hides(resource, name, created, by, now)


def find_job(cloud: Cloud, name: str, by: str = "get") -> Job:
    """`Refusal` (404) if there is none, or none is shown to this way of asking."""
    job = cloud.jobs.get(name)
    if job is None or is_hidden(cloud, "job", name, job.created, by):
        raise not_found("run" if by == "history" else "job", name)
    return job

"""The list of a workspace's jobs, read one by one: a job that the client library cannot read hides no other one.

The library's own list turns each job into an object of its kind, and ends at the first one of a kind that it does not
know (`JobException`), or that a pipeline has made. What is needed of a job is the same in each kind, so it is read here
as the service sends it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain_dagster.clusters.azure_ml.client import Service


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedJob:
    """A job of anybody's, of any kind, with what all kinds have in common; named as the client library names it."""

    name: str
    kind: str
    """Type of the job in the service's words, such as ``Command`` or ``Pipeline``; "" where it says none."""
    status: Any = None
    tags: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    services: Mapping[str, Any] = field(default_factory=dict)
    compute: str | None = None
    creation_context: Any = None


def list_every_job(service: Service, **only: str) -> Iterator[ListedJob]:
    """Yield the jobs of the workspace, archived ones too, in the service's order; ``only``: a filter of the service,
    such as ``tag``. Raise what the client library raises for a refused request."""
    operations = copy.copy(service.ml.jobs)  # a copy, since the library itself reads its jobs with this method
    operations._handle_rest_errors = lambda job: job  # type: ignore[assignment, method-assign, return-value]
    for job in operations.list(list_view_type="All", **only):
        yield read_listed_job(job)


def read_listed_job(job: Any) -> ListedJob:
    """Return a job as the service's answer has it; parts that are not there are empty. Pure."""
    said = getattr(job, "properties", None)
    if said is None:
        return ListedJob(name=str(job.name), kind="", creation_context=getattr(job, "system_data", None))
    return ListedJob(
        name=str(job.name),
        kind=str(getattr(said.job_type, "value", said.job_type) or ""),
        status=said.status,
        tags=dict(said.tags or {}),
        properties=dict(said.properties or {}),
        services=dict(said.services or {}),
        compute=said.compute_id,
        creation_context=getattr(job, "system_data", None),
    )

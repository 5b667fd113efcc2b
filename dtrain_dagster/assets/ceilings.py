"""The ceilings of a home, for assets that plan or start a job: a start that would exceed one fails its run, and people
are told.

What is a ceiling, and what it refuses, is decided in `dtrain_dagster.costs.ceilings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from dtrain_dagster.costs.ceilings import CeilingError, describe_stand
from dtrain_dagster.jobs.promises import Wanted, owner_here
from dtrain_dagster.jobs.spending import Judged, SpendingBook
from dtrain_dagster.resources import GPUClusterResource, ProjectResource
from dtrain_dagster.support.notify import notify_and_log


def wanted_by_run(
    context: dg.AssetExecutionContext,
    project: ProjectResource,
    name: str,
    usd_per_hour: float,
    usd: float | None,
    is_group: bool = False,
) -> Wanted:
    """Return what a Dagster run wants to start. ``usd_per_hour``: of all nodes; ``usd``: what it may cost in all."""
    owner = owner_here(project.experiment, context.run.tags)
    return Wanted(name=name, owner=owner, usd=usd, usd_per_hour=usd_per_hour, is_group=is_group)


def refuse_excess(
    context: dg.AssetExecutionContext, cluster: GPUClusterResource, project: ProjectResource, wanted: Wanted
) -> None:
    """Raise `dagster.Failure` where a start would exceed a ceiling, or that cannot be told."""
    with _telling(context, project):
        judged = _book(cluster, project).judge(wanted)
        _log(context, judged)
        if refusal := judged.refusal:
            raise CeilingError(refusal)


@contextmanager
def promising(
    context: dg.AssetExecutionContext, cluster: GPUClusterResource, project: ProjectResource, wanted: Wanted
) -> Iterator[None]:
    """Promise what a start may cost for as long as the block needs to launch it. Raise as `refuse_excess`."""
    with _telling(context, project), _book(cluster, project).promised(wanted) as judged:
        _log(context, judged)
        yield


def _book(cluster: GPUClusterResource, project: ProjectResource) -> SpendingBook:
    return SpendingBook(Path(project.home), project.jobs_uri, cluster.first_tier)


def _log(context: dg.AssetExecutionContext, judged: Judged) -> None:
    for stand in judged.stands:
        context.log.info(f"ceiling: {describe_stand(stand, judged.month)}")


@contextmanager
def _telling(context: dg.AssetExecutionContext, project: ProjectResource) -> Iterator[None]:
    """Tell people what a ceiling refuses, and let it fail the run."""
    try:
        yield
    except CeilingError as error:
        text = f"nothing is started: {error}"
        page = project.run_url(context.run.run_id)
        title = "dtrain: a job would exceed a ceiling on spending"
        notify_and_log(project.notify_urls(), title, f"{text} {page}", context.log)
        raise dg.Failure(text, metadata={"objection": str(error)}, allow_retries=False) from None

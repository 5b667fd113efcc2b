"""Whose a row of the bill is: the job's, its compute's, another compute's of the workspace, or somebody else's. Pure.

Azure ML's nodes are billed with the *workspace* as their resource. The compute is in the row's additional information,
as PoolName ``<compute>_<guid>`` (users' reports of exports; Microsoft documents neither). Tags of a compute are not
known to reach the bill. So rows are known by workspace and pool; by tags and names where an export has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from dtrain_dagster.clusters.azure_ml.bill_rows import BilledUsage
from dtrain_dagster.clusters.azure_ml.provision import CLUSTER_TAG

Belonging = Literal["job", "compute", "other_compute", "workspace", "elsewhere"]
"""Whose a row is: named as the job's; of a compute that it ran on; of another compute of its workspace; of that
workspace without a compute; or none of these."""
Workspace = tuple[str, str, str]
"""Subscription, resource group and name, in small letters."""
_WORKSPACE = re.compile(
    r"/subscriptions/([^/]+)/resourcegroups/([^/]+)/(?:providers/microsoft\.machinelearningservices/)?workspaces/"
    r"([^/?&#]+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The names and tags by which Azure knows a job."""

    job_id: str
    names: frozenset[str]
    """Names of its launches."""
    computes: frozenset[str]
    cluster: str = ""
    """Cluster in the tag of its computes, where a row has it."""
    workspace: Workspace | None = None
    """Where it ran; None: not known, and a compute of the same name in another workspace cannot be told apart."""


def marks_of(job_id: str, launch: Mapping[str, Any], workspace_id: str = "") -> Marks:
    """Return the marks of a job, from its ``launch.json``; ``workspace_id`` counts where that does not say where the
    job ran."""
    launches = [launch, *launch.get("history", ())]
    places = [workspace_of(unquote(str(item.get("studio_url") or ""))) for item in launches]
    return Marks(
        job_id=job_id,
        names=frozenset(str(item["job_name"]).casefold() for item in launches if item.get("job_name")),
        computes=frozenset(str(item["compute"]).casefold() for item in launches if item.get("compute")),
        cluster=str(launch.get("cluster_name") or "").casefold(),
        workspace=next((place for place in places if place), None) or workspace_of(workspace_id),
    )


def workspace_of(text: str) -> Workspace | None:
    """Return the workspace of Azure ML that a resource id or an address of the studio names, in any case of letters;
    None for others. The studio leaves the provider away."""
    found = _WORKSPACE.search(text.casefold())
    return (found[1], found[2], found[3]) if found else None


def compute_of_pool(pool: str) -> str:
    """Return the compute of a pool: ``gpu`` of ``gpu_0b5cf8e2-…``; the whole name where no such id follows."""
    return re.sub(r"_[0-9a-f-]{8,36}$", "", pool)


def belonging_of(row: BilledUsage, marks: Marks) -> Belonging:
    """Return whose the row is. What names the job counts first; then the workspace, the pool, and a compute that the
    row names in another way."""
    if _names_job(row, marks):
        return "job"
    there = workspace_of(row.resource)
    if there and marks.workspace and there != marks.workspace:
        return "elsewhere"
    is_here = there is not None and there == marks.workspace
    if row.pool and (there or not row.resource):
        if compute_of_pool(row.pool) in marks.computes or row.pool in marks.computes:
            return "compute"
        return "other_compute" if is_here else "elsewhere"
    if _names_compute(row, marks):
        return "compute"
    return "workspace" if is_here else "elsewhere"


def _names_job(row: BilledUsage, marks: Marks) -> bool:
    words = f"{row.tags}\n{row.info}\n{row.resource}".casefold()
    return any(
        re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", words) for name in (marks.job_id.casefold(), *marks.names)
    )


def _names_compute(row: BilledUsage, marks: Marks) -> bool:
    """Return whether the row's resource is a compute of the job, or it has the tag of the job's cluster."""
    parts = re.split(r"[/|]", row.resource.casefold())
    words = f"{row.tags}\n{row.info}".casefold()
    tag = rf'"{CLUSTER_TAG}"\s*:\s*"{re.escape(marks.cluster)}"'
    if marks.cluster and re.search(tag, words):
        return True
    return any(name in parts or re.search(rf'"{re.escape(name)}"', words) for name in marks.computes)

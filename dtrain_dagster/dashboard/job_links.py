"""The pages of other programs about a job: its Dagster run, its MLflow run, its page in the cluster's studio.

A run directory may hold anything, so no address is taken from it but one of a service that is known by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.notices import studio_url

_RUN_ID = re.compile(r"[0-9A-Za-z-]{8,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The addresses at which other programs' pages are found, from this orchestrator's own settings."""

    dagster_url: str = ""
    """Dagster's UI; "" where there is none."""
    mlflow_url: str = ""
    """MLflow's pages; "" where there are none."""
    is_mlflow_local: bool = True
    """Whether `dtrain ui mlflow` serves them."""


def places_of(settings: Settings) -> Places:
    """Return where a job can be seen besides the dashboard."""
    is_server = settings.tracking_uri.startswith(("http://", "https://"))
    served = settings.tracking_uri if is_server else "http://127.0.0.1:5000"
    return Places(
        dagster_url=settings.dagster_url.rstrip("/"), mlflow_url=served.rstrip("/"), is_mlflow_local=not is_server
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLink:
    """A link to another program's page."""

    label: str
    url: str
    note: str
    """What has to run for the page to be there; "" for a service."""


def links_of(
    places: Places,
    owner: Mapping[str, Any],
    job: Mapping[str, Any],
    tracking: Mapping[str, Any],
    launch: Mapping[str, Any],
) -> list[JobLink]:
    """Return the links of a job, from the contents of four files of its run directory, empty where missing."""
    found = []
    tags = (job.get("tracking") or {}).get("tags") or {}
    run_id = _run_id(owner.get("dagster_run_id") or tags.get("dagster_run_id"))
    if places.dagster_url and run_id:
        found.append(
            JobLink(label="Dagster run", url=f"{places.dagster_url}/runs/{run_id}", note="`dtrain ui` serves it")
        )
    run_id = _run_id(tracking.get("mlflow_run_id"))
    if places.mlflow_url and run_id:
        note = "`dtrain ui mlflow` serves it" if places.is_mlflow_local else ""
        found.append(JobLink(label="MLflow run", url=f"{places.mlflow_url}/#/runs/{run_id}", note=note))
    if url := studio_url(launch.get("studio_url")):
        found.append(JobLink(label="Azure ML studio", url=url, note=""))
    return found


def _run_id(value: Any) -> str:
    return value if isinstance(value, str) and _RUN_ID.fullmatch(value) else ""

"""Links to pages of a job: on the dashboard, in MLflow, in a cloud's studio. None of them holds a secret."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

STUDIOS = ("ml.azure.com",)
"""The hosts of clouds' own pages of jobs."""


def job_page(dashboard_url: str, job_id: str) -> str:
    """Return the address of a job's page on the dashboard."""
    return f"{dashboard_url.rstrip('/')}/jobs/{quote(job_id, safe='')}"


def run_page(mlflow_url: str, run_id: str) -> str:
    """Return the address of a run in MLflow's UI; "" where either is not known."""
    return f"{mlflow_url}/#/runs/{quote(run_id, safe='')}" if mlflow_url and run_id else ""


def studio_url(url: Any) -> str:
    """Return an address of a run directory, which nodes can write, if it is one of a studio that is known; "" for any
    other. Pure."""
    text = url if isinstance(url, str) else ""
    try:
        parts = urlsplit(text)
    except ValueError:
        return ""
    is_known = parts.scheme == "https" and parts.hostname in STUDIOS and parts.netloc == parts.hostname
    return text if is_known and not any(letter.isspace() for letter in text) else ""  # urlsplit leaves out line ends

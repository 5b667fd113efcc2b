"""The settings of links and notices: which pages people are sent to. None of them is a secret."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dtrain_dagster.settings.environment import PREFIX, EnvironmentSettings, SettingsError

STUDIOS = ("ml.azure.com",)
"""The hosts of clouds' own pages of jobs."""
MLFLOW_HERE = "http://127.0.0.1:5000"
"""Where `dtrain ui mlflow` serves MLflow's UI."""
_ADDRESS = r"^https?://[^\s@?#]+$"


class NoticeSettings(EnvironmentSettings):
    """Every field is the environment variable of that name in capitals after ``DTRAIN_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    dashboard_url: str = Field(
        default="http://127.0.0.1:8060",
        pattern=_ADDRESS,
        description="The dashboard as people open it in a browser, for links in Dagster and in notices",
    )
    mlflow_url: str | None = Field(
        default=None,
        pattern=_ADDRESS,
        description="MLflow's UI as people open it, for links in Dagster; unset: the tracking server where it is one, "
        f"else `{MLFLOW_HERE}`, where `dtrain ui mlflow` serves it",
    )

    def mlflow_page(self, tracking_uri: str) -> str:
        """Return the address of MLflow's UI. ``tracking_uri``: where figures are written; a reference to a secret is
        not resolved for a link."""
        is_server = re.match(_ADDRESS, tracking_uri) is not None
        return (self.mlflow_url or (tracking_uri if is_server else MLFLOW_HERE)).rstrip("/")


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


def read_notice_settings() -> NoticeSettings:
    """Return the settings. Raise `dtrain_dagster.settings.environment.SettingsError` for values that cannot be used."""
    return NoticeSettings.read()


def notice_settings_or_defaults() -> NoticeSettings:
    """Return the settings, or the defaults where one cannot be used: a notice is sent nevertheless."""
    try:
        return read_notice_settings()
    except SettingsError:
        return NoticeSettings.model_construct()

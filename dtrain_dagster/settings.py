"""Which cluster, storage, registry and prices: from ``DTRAIN_*`` environment variables, checked before anything starts.

What a person changes from run to run (epochs, learning rate, window…) is not here but in the launchpad of its asset.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dtrain_dagster.secrets import check_reference, check_token, redact

PREFIX = "DTRAIN_"
_ENDPOINT = re.compile(r"https?://[^\s@?#]+|[a-z][a-z0-9-]{1,30}[a-z0-9]")
S = TypeVar("S", bound=BaseSettings)


class SettingsError(ValueError):
    """An environment variable cannot be used. The message names it, its value and the remedy."""


class Settings(BaseSettings):
    """Every field is the environment variable of that name in capitals after ``DTRAIN_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", env_ignore_empty=True)

    home: Path = Field(default=Path(".dtrain"), description="Folder for everything that is written on this machine")

    storage: str | None = Field(
        default=None,
        pattern=r"^az://[a-z0-9](-?[a-z0-9]){2,62}(/.*)?$",
        description="Where nodes of the cloud find datasets and run directories: az://container/path",
    )
    cluster: Literal["local", "azure_ml"] = Field(default="local", description="Kind of cluster")
    cluster_name: str = Field(
        default="local", pattern=r"^[A-Za-z][A-Za-z0-9-]{0,31}$", description="Name of the cluster"
    )
    nodes: int = Field(default=3, ge=1, le=256, description="Nodes that training runs on (R1.1)")
    processes_per_node: int = Field(
        default=1, ge=1, le=16, description="Ranks per node, one per GPU where there are any"
    )
    threads_per_rank: int | None = Field(default=None, ge=1, description="CPU threads per rank; unset: cores / ranks")
    max_replacements: int = Field(default=6, ge=0, description="Lost nodes that are replaced while a job runs (R2.3)")
    replacement_delay_seconds: float = Field(
        default=1.0, ge=0, lt=float("inf"), description="How long a node is gone before another takes its place"
    )
    gpu_type: str = Field(default="Standard_NC6s_v3", description="SKU; on the local cluster its price stands in")
    tier: Literal["dedicated", "low_priority"] = Field(default="dedicated", description="Tier whose price is used")
    region: str = Field(
        default="eastus",
        pattern=r"^[a-z]+[a-z0-9]*$",
        description="Azure region whose prices count; on Azure ML that of the workspace",
    )

    prices: str = Field(default="sp500_panel", description="sp500_panel, us_ohlcv, yfinance, or the address of a file")
    calendar: str = Field(default="XNYS", description="Exchange calendar of the prices, or none")

    mlflow_tracking_uri: str | None = Field(default=None, description="MLflow server; unset: SQLite under the home")
    experiment: str = Field(default="dtrain", min_length=1, description="MLflow experiment")
    model_name: str = Field(default="stock-return-distribution", min_length=1, description="Registered model's name")
    dagster_url: str = Field(default="http://127.0.0.1:3000", description="Dagster's UI, for links back from a model")

    endpoint: str | None = Field(
        default=None,
        description="Scoring endpoint that models have to suit (R6.4): its address, or its name in the workspace",
    )
    endpoint_dialect: Literal["mlflow", "azureml"] | None = Field(
        default=None, description="mlflow or azureml, as for `dtrain endpoint check`; unset: azureml for a name"
    )
    endpoint_token: str | None = Field(
        default=None, description="Where its key or token is: env:NAME, keyvault://vault/secret, or identity"
    )

    retrain_cron: str = Field(
        default="0 6 * * 6", description="When the weekly retraining runs, once it is switched on"
    )
    retrain_timezone: str = Field(default="America/New_York", description="Time zone of that schedule")
    retrain_budget_usd: float = Field(
        default=0, ge=0, lt=float("inf"), description="What a retraining may cost that nobody looks at; 0: no limit"
    )
    retrain_debounce_minutes: float = Field(
        default=10, ge=0, lt=float("inf"), description="How long a changed price file has to stay as it is"
    )
    retrain_max_age_days: float = Field(
        default=30, gt=0, lt=float("inf"), description="Age at which the champion, or its data, is stale"
    )
    idle_minutes: float = Field(default=10, gt=0, description="A cluster without work for longer is scaled down (R1.2)")
    overrun_fraction: float = Field(
        default=0.25, gt=0, description="Cost above the estimate that raises an alert (R5.4)"
    )

    queue_deadline_hours: float = Field(
        default=24, gt=0, description="How long a run waits for capacity before it is given up (R1.4)"
    )
    notify: str = Field(
        default="",
        description="Apprise addresses (or keyvault://vault/secret, env:NAME) that are told of "
        "alerts, separated by spaces",
    )
    orphan_policy: Literal["notify", "cancel"] = Field(
        default="notify", description="What happens to jobs and computes whose Dagster run has ended"
    )
    orphan_minutes: float = Field(default=30, gt=0, description="How long they may go on before that")

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @field_validator("notify")
    @classmethod
    def _references(cls, notify: str) -> str:
        for address in notify.split():
            check_reference(address)
        return notify

    @field_validator("endpoint")
    @classmethod
    def _without_credentials(cls, endpoint: str | None) -> str | None:
        if endpoint and not _ENDPOINT.fullmatch(endpoint):
            raise ValueError(
                f"give an address, http(s)://…, without user, password or query (what authorises belongs in {PREFIX}"
                "ENDPOINT_TOKEN), or the name of an endpoint of the workspace"
            )
        return endpoint

    @field_validator("endpoint_token")
    @classmethod
    def _where_the_token_is(cls, token: str | None) -> str | None:
        if token:
            check_token(token)
        return token

    @model_validator(mode="after")
    def _endpoints_with_names_are_azures(self) -> Settings:
        if self.endpoint and "://" not in self.endpoint and self.cluster != "azure_ml":
            raise ValueError(
                f"{PREFIX}ENDPOINT={self.endpoint!r} is a name, which only DTRAIN_CLUSTER=azure_ml has endpoints for; "
                "give the whole address, http(s)://…"
            )
        return self

    @model_validator(mode="after")
    def _nodes_reach_their_storage(self) -> Settings:
        if (self.cluster == "local") != (self.storage is None):
            remedy = (
                "unset it: the local cluster keeps everything under DTRAIN_HOME"
                if self.storage
                else "set it to az://container/path, which the nodes of DTRAIN_CLUSTER=azure_ml can reach"
            )
            raise ValueError(f"{PREFIX}STORAGE={self.storage or ''!r} does not go with this cluster; {remedy}")
        return self

    @property
    def storage_uri(self) -> str:
        """Where prices and datasets are built, on this machine."""
        return str(self.home / "storage")

    @property
    def shared_uri(self) -> str:
        """What the nodes of the cluster can reach: run directories, and the datasets that they read."""
        return self.storage.rstrip("/") if self.storage else self.storage_uri

    @property
    def jobs_uri(self) -> str:
        return f"{self.shared_uri}/jobs"

    @property
    def cache_dir(self) -> Path:
        """Node-local cache of shards."""
        return self.home / "cache"

    @property
    def tracking_uri(self) -> str:
        return self.mlflow_tracking_uri or f"sqlite:///{self.home / 'mlflow.db'}"


def load_settings() -> Settings:
    """Read and check the environment. Raises `SettingsError` with one line per variable that cannot be used."""
    return read_environment(Settings)


def setting(name: str) -> str:
    """One setting as the environment has it, not checked: for what is asked often."""
    return os.environ.get(f"{PREFIX}{name.upper()}") or str(Settings.model_fields[name].get_default())


def read_environment(kind: type[S]) -> S:
    """Settings of this kind from the environment; raises as `load_settings` does."""
    try:
        return kind()
    except ValidationError as error:
        prefix = kind.model_config["env_prefix"]
        lines = []
        for item in error.errors(include_url=False):
            if not item["loc"]:  # several variables do not go together; the message names them
                lines.append(item["msg"].removeprefix("Value error, "))
                continue
            name = str(item["loc"][0])
            field = kind.model_fields.get(name)
            about = f" ({field.description})" if field and field.description else ""
            if item["type"] == "missing":
                lines.append(f"{prefix}{name.upper()}{about} is not set")
                continue
            default = f"; unset it for the default, {field.get_default()}" if field and not field.is_required() else ""
            lines.append(f"{prefix}{name.upper()}={item['input']!r}{about}: {item['msg']}{default}")
        raise SettingsError(redact("\n".join(lines))) from None

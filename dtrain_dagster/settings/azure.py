"""What ``DTRAIN_CLUSTER=azure_ml`` needs to know: ``DTRAIN_AZURE_*`` environment variables. No secret is among them."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dtrain_dagster.settings.data_lake import DataLakeFolder, refuse_folder_of_nodes
from dtrain_dagster.settings.environment import setting, without_secret

PREFIX = "DTRAIN_AZURE_"


class AzureSettings(BaseSettings):
    """Every field is the environment variable of that name in capitals after ``DTRAIN_AZURE_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", env_ignore_empty=True)

    subscription_id: str = Field(description="Subscription; `az account show --query id` prints it")
    resource_group: str = Field(description="Resource group of the workspace")
    workspace: str = Field(description="Azure ML workspace")
    image: str = Field(
        description="Image of the nodes (registry.azurecr.io/dtrain:1, see deploy/azure), or an environment of the "
        "workspace (azureml:dtrain:1)"
    )
    chain: str = Field(
        default="", description="Sizes to try after DTRAIN_GPU_TYPE, separated by commas; unset: one GPU of each kind"
    )
    tiers: str = Field(default="dedicated", description="Tiers in order, separated by commas: dedicated, low_priority")
    max_nodes: int | None = Field(default=None, ge=1, description="A compute grows to so many; unset: as many as asked")
    idle_seconds: int = Field(default=600, ge=1, description="An idle node is given back after so long")
    vnet: str | None = Field(default=None, description="Virtual network of the nodes")
    subnet: str | None = Field(default=None, description="Its subnet, or the resource id of one")
    public_ip: bool = Field(default=False, description="May nodes have public addresses?")
    identity: str | None = Field(default=None, description="Resource id of the nodes' identity; unset: system-assigned")
    identity_client_id: str | None = Field(default=None, description="Client id of that identity")
    require_own_key: bool = Field(
        default=False, description="Buy nothing in a workspace without a customer-managed encryption key"
    )
    queue_deadline_seconds: float = Field(
        default=3600, gt=0, description="A job that Azure keeps queued for longer goes on elsewhere"
    )
    silence_seconds: float = Field(
        default=900, gt=0, description="A job of which nothing is heard for longer is lost (NotResponding)"
    )
    job_timeout_seconds: float = Field(default=604800, gt=0, description="Azure ends a job that runs for longer")
    poll_seconds: float = Field(default=5, gt=0, description="Between two looks at a job that is followed")
    max_resubmissions: int = Field(
        default=6, ge=0, description="How often a job that lost its nodes is submitted again"
    )
    dagster_storage: str | None = Field(
        default=None,
        description="Where Dagster keeps outputs of runs and values of assets: abfss://filesystem@account.dfs.core."
        "windows.net/path; unset: in DAGSTER_HOME",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_secrets(cls, value: object, info: ValidationInfo) -> object:
        return without_secret(cls, str(info.field_name), value)

    @model_validator(mode="after")
    def _values_lie_where_no_node_writes(self) -> AzureSettings:
        if (folder := self.dagster_folder()) is not None:
            try:
                refuse_folder_of_nodes(folder, setting("storage"), os.environ.get("AZURE_STORAGE_ACCOUNT_URL", ""))
            except ValueError as error:
                raise ValueError(f"{PREFIX}DAGSTER_STORAGE={self.dagster_storage!r}: {error}") from None
        return self

    @field_validator("dagster_storage")
    @classmethod
    def _address(cls, address: str | None) -> str | None:
        if address:
            DataLakeFolder.parse(address)
        return address

    def dagster_folder(self) -> DataLakeFolder | None:
        """Return where Dagster keeps outputs and values; None: on this machine."""
        return DataLakeFolder.parse(self.dagster_storage) if self.dagster_storage else None

    def options(self) -> dict[str, Any]:
        """As `dtrain_dagster.clusters.azure_ml.options.AzureMLOptions` takes them, in JSON's types; what is unset is
        left out."""
        given = self.model_dump(exclude_none=True, exclude={"dagster_storage"})
        lists = {name: _words(given.pop(name)) for name in ("chain", "tiers")}
        return {**given, **{name: words for name, words in lists.items() if words}}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]

"""The settings of ``DTRAIN_CLUSTER=azure_ml``: ``DTRAIN_AZURE_*`` environment variables. None of them is a secret."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from dtrain_dagster.settings.environment import (
    BUYABLE_GPU_TYPE,
    EnvironmentSettings,
    Settings,
    SettingsError,
    split_words,
)

PREFIX = "DTRAIN_AZURE_"
MAX_IDLE_SECONDS = 86400
_CLUSTER_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9-]{0,10}[A-Za-z0-9])?")


class AzureSettings(EnvironmentSettings):
    """The settings of Azure ML. Every field is the environment variable of that name in capitals after
    ``DTRAIN_AZURE_``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    subscription_id: str = Field(
        pattern=r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
        description="Subscription; `az account show --query id` prints it",
    )
    resource_group: str = Field(description="Resource group of the workspace")
    workspace: str = Field(description="Azure ML workspace")
    image: str = Field(
        description="Image of the nodes (registry.azurecr.io/dtrain:1, see deploy/azure), or an environment of the "
        "workspace (azureml:dtrain:1)"
    )
    chain: Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(split_words)] = Field(
        default=None,
        description="Sizes to try after DTRAIN_GPU_TYPE, separated by commas; unset: A100, H100 and T4 sizes with as "
        "many GPUs, where the region has a price",
    )
    subnet: str | None = Field(
        default=None, pattern="^/subscriptions/", description="Resource id of the subnet of the nodes"
    )
    public_ip: bool = Field(default=False, description="Whether nodes may have public addresses")
    identity: str | None = Field(
        default=None,
        pattern=r"(?i)^/subscriptions/.+/Microsoft\.ManagedIdentity/userAssignedIdentities/[^/]+$",
        description="Resource id of the nodes' identity; unset: system-assigned",
    )
    identity_client_id: str | None = Field(default=None, description="Client id of that identity")
    queue_deadline_seconds: float = Field(
        default=3600, gt=0, description="A job that Azure keeps queued for longer is cancelled and tried elsewhere"
    )

    @field_validator("chain")
    @classmethod
    def _sizes(cls, chain: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for entry in chain or ():
            if not re.fullmatch(r"Standard_\w+", entry):
                raise ValueError(f"{entry} is no size such as {BUYABLE_GPU_TYPE}")
        return chain


def refuse_unusable(cluster_name: str, idle_seconds: float) -> None:
    """Raise `SettingsError` for what no compute of Azure ML takes, from the environment or from a launchpad."""
    if not 1 <= idle_seconds <= MAX_IDLE_SECONDS:
        raise SettingsError(
            f"DTRAIN_IDLE_MINUTES={idle_seconds / 60:g} is not between a second and the {MAX_IDLE_SECONDS // 60} (a "
            "day) that a compute of Azure ML takes"
        )
    if not _CLUSTER_NAME.fullmatch(cluster_name):
        raise SettingsError(
            f"DTRAIN_CLUSTER_NAME={cluster_name} must be 1 to 12 letters, digits and hyphens, a letter first and no "
            "hyphen last: what is bought is called <name>-<size>, of which the service takes 24 characters"
        )


def read_azure_options(settings: Settings) -> dict[str, Any]:
    """Return the environment's arguments of `dtrain_dagster.clusters.azure_ml.options.AzureMLOptions`, with two that
    every kind of cluster gets: the order of tiers, and the seconds after which an idle node is given back. Raise
    `SettingsError` for missing or unusable values."""
    idle_seconds = max(1, round(60 * settings.idle_minutes))
    refuse_unusable(settings.cluster_name, idle_seconds)
    own = AzureSettings.read().options()
    return {**own, "tiers": list(settings.tiers), "idle_seconds": idle_seconds}

"""The settings of ``DTRAIN_CLUSTER=azure_ml``: ``DTRAIN_AZURE_*`` environment variables, of which none is a secret, and
the options of a cluster, which are the same with what every kind of cluster gets."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

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
    OPTIONS: ClassVar[tuple[str, ...]] = (
        "chain",
        "subnet",
        "public_ip",
        "identity",
        "identity_client_id",
        "queue_deadline_seconds",
    )

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


class AzureMLOptions(AzureSettings):
    """The options of a cluster. The environment is not read again; nobody but tests sets the times, in seconds."""

    model_config = SettingsConfigDict(frozen=True)
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    storage_uri: str
    """Root of the run directories (``az://container/path``), which are below ``jobs/``."""
    cluster_name: str = "dtrain"
    """Computes are called ``<cluster_name>-<size>``, with ``-lp`` for Spot: one for each kind that was got."""
    processes_per_node: int = 1
    chain: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ("dedicated",)
    """Tiers in order: all sizes in the first, then all in the second."""
    idle_seconds: int = 600
    """Seconds after which the service itself gives back an idle node."""
    poll_seconds: float = 5.0
    max_resubmissions: int = 6
    """Times that a job that has lost its nodes is submitted again before a person has to look."""

    allocation_patience_seconds: float = 600.0
    """Longest wait in the queue where the service says that it cannot get nodes of this size and there is another size
    to try."""
    silence_seconds: float = 900.0
    """Silence after which a running job (NotResponding) is lost."""
    start_seconds: float = 120.0
    """Duration of a submission, after which the process that follows the job makes it again. It is never bought
    twice. For as long the service may say 404 of what was made just now."""
    missing_seconds: float = 180.0
    """Seconds after which a job that the service says not to know is gone."""
    patience_seconds: float = 180.0
    """Time for which a request that fails for a transient reason is tried again."""
    look_patience_seconds: float = 15.0
    """The same for a look at a job, which comes again anyway."""
    operation_seconds: float = 900.0
    """Longest time to make, change or delete a compute."""
    cancel_seconds: float = 600.0
    """Longest time of a cancellation."""
    polling_interval_seconds: int = 5
    """Time between questions about a long-running operation, where the service does not say."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @property
    def root_uri(self) -> str:
        """Return the address of the storage's root."""
        return self.storage_uri.rstrip("/")

    @property
    def jobs_uri(self) -> str:
        """Return the address of the run directories."""
        return f"{self.root_uri}/jobs"

    @property
    def workspace_id(self) -> str:
        """Return the resource id of the workspace."""
        return (
            f"/subscriptions/{self.subscription_id}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.workspace}"
        )

    @property
    def studio_url(self) -> str:
        """Return the address of the workspace in Azure ML studio."""
        return f"https://ml.azure.com/?wsid={self.workspace_id}"


def refuse_unusable(cluster_name: str, idle_seconds: float) -> None:
    """Raise `SettingsError` for what no compute of Azure ML takes, from the environment or from a launchpad."""
    if not 1 <= idle_seconds <= MAX_IDLE_SECONDS:
        raise SettingsError(
            f"idle_minutes={idle_seconds / 60:g} is not between a second and the {MAX_IDLE_SECONDS // 60} (a "
            "day) that a compute of Azure ML takes (DTRAIN_OPTIONS)"
        )
    if not _CLUSTER_NAME.fullmatch(cluster_name):
        raise SettingsError(
            f"DTRAIN_CLUSTER_NAME={cluster_name} must be 1 to 12 letters, digits and hyphens, a letter first and no "
            "hyphen last: what is bought is called <name>-<size>, of which the service takes 24 characters"
        )


def read_azure_options(settings: Settings) -> dict[str, Any]:
    """Return the environment's arguments of `AzureMLOptions`, with two that every kind of cluster gets: the order of
    tiers, and the seconds after which an idle node is given back. Raise `SettingsError` for missing or unusable
    values."""
    idle_seconds = max(1, round(60 * settings.idle_minutes))
    refuse_unusable(settings.cluster_name, idle_seconds)
    own = AzureSettings.read().options()
    return {**own, "tiers": list(settings.tiers), "idle_seconds": idle_seconds}

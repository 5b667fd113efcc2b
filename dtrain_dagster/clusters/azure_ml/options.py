"""The options of an Azure ML cluster: where it is, what it may buy, how long it waits.

`dtrain_dagster.settings.azure` checks what people set; the times below are set by nobody but tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dtrain_dagster.clusters.azure_ml.sku_chain import DEFAULT_CHAIN

LONGEST_JOB_SECONDS = 7 * 86400
"""Seconds after which the service ends a job: as many as it lets one run on Spot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureMLOptions:
    """The options of a cluster; times are seconds. Those without a word here are explained in `AzureSettings`."""

    subscription_id: str
    resource_group: str
    workspace: str
    """Computes are called ``<cluster_name>-<size>``, with ``-lp`` for Spot: one for each kind that was got."""
    storage_uri: str
    """Root of the run directories (``az://container/path``), which are below ``jobs/``."""
    cluster_name: str = "dtrain"
    image: str = ""
    processes_per_node: int = 1
    chain: tuple[str, ...] = DEFAULT_CHAIN
    tiers: tuple[str, ...] = ("dedicated",)
    """Tiers in order: all sizes in the first, then all in the second."""
    idle_seconds: int = 600
    """Seconds after which the service itself gives back an idle node."""
    subnet: str | None = None
    public_ip: bool = False
    identity: str | None = None
    identity_client_id: str | None = None
    queue_deadline_seconds: float = 3600.0
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
    def of(cls, settings: Mapping[str, Any], **more: Any) -> Self:
        """Return the options of what `dtrain_dagster.settings.azure.read_azure_options` has read, and more of them."""
        own: dict[str, Any] = {name: tuple(it) if isinstance(it, list) else it for name, it in settings.items()}
        return cls(**own, **more)

    @property
    def jobs_uri(self) -> str:
        """Return the address of the run directories."""
        return f"{self.root_uri}/jobs"

    @property
    def root_uri(self) -> str:
        """Return the address of the storage's root."""
        return self.storage_uri.rstrip("/")

    @property
    def studio_url(self) -> str:
        """Return the address of the workspace in Azure ML studio."""
        return f"https://ml.azure.com/?wsid={self.workspace_id}"

    @property
    def workspace_id(self) -> str:
        """Return the resource id of the workspace."""
        return (
            f"/subscriptions/{self.subscription_id}/resourceGroups/{self.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.workspace}"
        )

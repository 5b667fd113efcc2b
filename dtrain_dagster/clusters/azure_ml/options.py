"""The options of an Azure ML cluster: where it is, what it may buy, how long it waits. Checked before all else."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dtrain_dagster.clusters.azure_ml.sku_chain import DEFAULT_CHAIN
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.settings.tiers import TIERS, current_tier, tier_of

_GUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_CLUSTER_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9-]{0,10}[A-Za-z0-9])?")
_SKU = re.compile(r"Standard_[A-Za-z0-9_]+")
_IDENTITY = re.compile(
    r"(?i)/subscriptions/[^/]+/resourcegroups/[^/]+/providers/Microsoft\.ManagedIdentity/userAssignedIdentities/[^/]+"
)

DAY = 86400.0
LONGEST_JOB = {"dedicated": 21 * DAY, "spot": 7 * DAY}
"""Seconds that the service lets a job run at most, by tier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AzureMLOptions:
    """The checked options of a cluster; times are seconds. It raises `ClusterError`, which names the setting and the
    remedy, for an unusable value."""

    subscription_id: str
    resource_group: str
    workspace: str
    """Computes are called ``<cluster_name>-<size>``, with ``-lp`` for Spot: one for each kind that was got."""
    storage_uri: str
    """Root of the run directories (``az://container/path``), which are below ``jobs/``."""
    cluster_name: str = "dtrain"

    image: str = ""
    """Prebuilt image that the nodes run (``registry.azurecr.io/dtrain:1``), or an environment of the workspace
    (``azureml:dtrain:1``). Needed as soon as a job is submitted."""
    processes_per_node: int = 1
    chain: tuple[str, ...] = DEFAULT_CHAIN
    """Sizes in the order in which they are tried after the requested one. ``<size>@spot`` or
    ``<size>@dedicated`` is tried in that tier only, in its place."""
    tiers: tuple[str, ...] = ("dedicated",)
    """Tiers in order: all sizes in the first, then all in the second."""
    idle_seconds: int = 600
    """Seconds after which the service itself gives back an idle node."""

    subnet: str | None = None
    """Resource id of the nodes' subnet."""
    public_ip: bool = False
    """Whether nodes may have public addresses. Without them the workspace needs a managed network, or ``subnet``
    here."""
    identity: str | None = None
    """Resource id of the user-assigned identity of the nodes; None: a system-assigned one."""
    identity_client_id: str | None = None
    """Client id of that identity, which the nodes need to choose it."""
    require_own_key: bool = False
    """Whether to buy nothing in a workspace that is not encrypted with a customer-managed key."""

    experiment: str = "dtrain"
    queue_deadline_seconds: float = 3600.0
    """Longest wait of a job in the queue; then it is cancelled, and continues elsewhere, or with fewer nodes, or not at
    all."""
    allocation_patience_seconds: float = 600.0
    """The same where the service says that it cannot get nodes of this size and there is another size to try."""
    silence_seconds: float = 900.0
    """Silence after which a running job (NotResponding) is lost."""
    job_timeout_seconds: float = 7 * DAY
    """Duration after which the service ends a job."""
    max_resubmissions: int = 6
    """Times that a job that has lost its nodes is submitted again before a person has to look."""
    start_seconds: float = 120.0
    """Duration of a submission, after which the process that follows the job makes it again. It is never bought
    twice. For as long the service may say 404 of what was made just now."""
    missing_seconds: float = 180.0
    """A job that the service says not to know, at three looks or more over this time, is gone."""

    poll_seconds: float = 5.0
    """Least time between two requests for a job's status."""
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

    def __post_init__(self) -> None:
        _require(
            bool(_GUID.fullmatch(self.subscription_id)),
            "DTRAIN_AZURE_SUBSCRIPTION_ID",
            self.subscription_id,
            "is not a subscription id; `az account show --query id` prints it",
        )
        _require(
            bool(self.resource_group),
            "DTRAIN_AZURE_RESOURCE_GROUP",
            self.resource_group,
            "must name the workspace's resource group",
        )
        _require(bool(self.workspace), "DTRAIN_AZURE_WORKSPACE", self.workspace, "must name an Azure ML workspace")
        _require(
            bool(_CLUSTER_NAME.fullmatch(self.cluster_name)),
            "DTRAIN_CLUSTER_NAME",
            self.cluster_name,
            "must be 1 to 12 letters, digits and hyphens, a letter first and no hyphen last: what is bought "
            "is called <name>-<size>, of which the service takes 24 characters",
        )
        _require(
            self.processes_per_node >= 1, "DTRAIN_PROCESSES_PER_NODE", self.processes_per_node, "must be 1 or more"
        )
        _require(
            0 < self.idle_seconds <= 86400,
            "idle_seconds",
            self.idle_seconds,
            "must be 1 to 86400: 0 is not passed on, and the service's own default would apply",
        )
        known = bool(self.tiers) and {*map(current_tier, self.tiers)} <= set(TIERS)
        _require(known, "tiers", self.tiers, f"must be of {TIERS}")
        for entry in self.chain:
            sku, _, tier = entry.partition("@")
            good = bool(_SKU.fullmatch(sku)) and (not tier or current_tier(tier) in TIERS)
            _require(
                good, "chain", entry, "is no size such as Standard_NC24ads_A100_v4 or Standard_NC24ads_A100_v4@spot"
            )
        _require(
            self.subnet is None or self.subnet.startswith("/subscriptions/"),
            "subnet",
            self.subnet,
            "is not the resource id of a subnet",
        )
        _require(
            self.identity is None or bool(_IDENTITY.fullmatch(self.identity)),
            "identity",
            self.identity,
            "is not the resource id of a user-assigned identity",
        )
        _require(self.max_resubmissions >= 0, "max_resubmissions", self.max_resubmissions, "must be 0 or more")
        for name in (
            "queue_deadline_seconds", "allocation_patience_seconds", "silence_seconds", "missing_seconds",
            "job_timeout_seconds", "operation_seconds", "cancel_seconds", "patience_seconds", "look_patience_seconds",
            "polling_interval_seconds",
        ):  # fmt: skip
            value = getattr(self, name)
            _require(0 < value < float("inf"), name, value, "must be a positive number of seconds")

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

    def timeout_seconds(self, tier: str) -> int:
        """Return the seconds that a job may run: the setting, or less where the service allows less."""
        return int(min(self.job_timeout_seconds, LONGEST_JOB[tier_of(tier)]))


def _require(good: bool, name: str, value: object, problem: str) -> None:
    if not good:
        raise ClusterError(f"{name}={value!r} {problem}")

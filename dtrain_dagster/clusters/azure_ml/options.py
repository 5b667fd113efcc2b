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

_NAME_RULE = (
    "must be 1 to 12 letters, digits and hyphens, a letter first and no hyphen last: what is bought is called "
    "<name>-<size>, of which the service takes 24 characters"
)
_TIMES = (
    *("queue_deadline_seconds", "allocation_patience_seconds", "silence_seconds", "missing_seconds"),
    *("job_timeout_seconds", "operation_seconds", "cancel_seconds", "patience_seconds", "look_patience_seconds"),
    "polling_interval_seconds",
)
_VARIABLES = {
    "subscription_id": "DTRAIN_AZURE_SUBSCRIPTION_ID",
    "resource_group": "DTRAIN_AZURE_RESOURCE_GROUP",
    "workspace": "DTRAIN_AZURE_WORKSPACE",
    "cluster_name": "DTRAIN_CLUSTER_NAME",
    "processes_per_node": "DTRAIN_PROCESSES_PER_NODE",
}
"""Field → the variable that people set it by, for messages."""

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
        identity, subnet = self.identity, self.subnet
        tiers, idle = {*map(current_tier, self.tiers)}, 0 < self.idle_seconds <= DAY
        rules: list[tuple[object, str, str]] = [
            (_GUID.fullmatch(self.subscription_id), "subscription_id", "is no id; `az account show` prints it"),
            (self.resource_group, "resource_group", "must name the workspace's resource group"),
            (self.workspace, "workspace", "must name an Azure ML workspace"),
            (_CLUSTER_NAME.fullmatch(self.cluster_name), "cluster_name", _NAME_RULE),
            (self.processes_per_node >= 1, "processes_per_node", "must be 1 or more"),
            (idle, "idle_seconds", "must be 1 to 86400: of 0 the service would take its own default"),
            (tiers and tiers <= set(TIERS), "tiers", f"must be of {TIERS}"),
            (all(map(_is_choice, self.chain)), "chain", f"must be sizes such as {DEFAULT_CHAIN[0]} or <size>@spot"),
            (subnet is None or subnet.startswith("/subscriptions/"), "subnet", "is not a subnet's resource id"),
            (identity is None or _IDENTITY.fullmatch(identity), "identity", "is not an identity's resource id"),
            (self.max_resubmissions >= 0, "max_resubmissions", "must be 0 or more"),
        ]
        values = ((name, getattr(self, name)) for name in _TIMES)
        rules += [(0 < value < float("inf"), name, "must be a positive number of seconds") for name, value in values]
        for is_good, name, problem in rules:
            if not is_good:
                raise ClusterError(f"{_VARIABLES.get(name, name)}={getattr(self, name)!r} {problem}")

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


def _is_choice(entry: str) -> bool:
    sku, _, tier = entry.partition("@")
    return bool(_SKU.fullmatch(sku)) and (not tier or current_tier(tier) in TIERS)

"""What there is in the emulated cloud: plain data. What happens to it is in `scaling` and `jobs`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.azure.emulator.clock import Clock, duration_seconds

if TYPE_CHECKING:
    from harness.azure.emulator.faults import Faults
    from harness.azure.emulator.jobs import Job

SUBSCRIPTION = "00000000-0000-4000-8000-000000000001"
RESOURCE_GROUP = "dtrain-rg"
WORKSPACE = "dtrain-ws"
LOCATION = "eastus"
TENANT = "00000000-0000-4000-8000-00000000000a"
CONTAINER = "dtrain"
"""The container for run directories."""
DATASTORE = "workspaceblobstore"
DATASTORE_CONTAINER = "azureml-blobstore-emulated"
WORKSPACE_ID = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{RESOURCE_GROUP}"
    f"/providers/Microsoft.MachineLearningServices/workspaces/{WORKSPACE}"
)
LOCATION_ID = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.MachineLearningServices/locations/{LOCATION}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A row of sizes.json."""

    linux_standard_usd_per_hour: float
    linux_low_priority_usd_per_hour: float
    low_priority_capable: bool
    gpus: int
    vcpus: int
    memory_gb: float
    infiniband: bool
    family: str
    compute_types: list[str] = field(default_factory=lambda: ["AmlCompute", "ComputeInstance", "MIR"])
    """As recorded: A10 sizes are for MIR (managed online endpoints) alone, all others of ours for all three."""


@cache
def read_sizes() -> dict[str, Size]:
    rows = json.loads(Path(__file__).with_name("sizes.json").read_text())["sizes"]
    return {name: Size(**row) for name, row in rows.items()}


def listed_name(vm_size: str) -> str:
    """A size as `vmSizes` spells it; as it is where that list does not have it. Letters count as in any case."""
    folded = vm_size.casefold()
    return next((name for name in read_sizes() if name.casefold() == folded), vm_size)


@dataclass(slots=True, kw_only=True)
class Timing:
    """How long things take, in seconds of the emulator's clock, except where it says otherwise."""

    create_seconds: float = 0.3
    refusal_seconds: float = 0.0
    """How long after its creation a compute shows that it will never have a node."""
    delete_seconds: float = 0.2
    visible_seconds: float = 0.0
    """How long after its PUT a job or a compute is 404 to who asks for it; see `consistency`."""
    listed_seconds: float = 0.0
    """How long after its PUT it is in no list."""
    boot_seconds: float = 0.3
    """A node, from being allocated to being idle. Paid for."""
    leave_seconds: float = 0.2
    allocation_retry_seconds: float = 2.0
    """How often the autoscaler asks again where there was no capacity."""
    unusable_seconds: float = 1.0
    """How long a lost node stays in the list. A preempted one costs nothing then, an unusable one does not either."""
    prepare_seconds: float = 0.0
    """A job in Preparing, on top of the time in which its code is really downloaded."""
    grace_seconds: float = 10.0
    """From SIGTERM to SIGKILL; of the real clock, since processes live in it."""


@dataclass(slots=True, kw_only=True)
class Operation:
    """A long-running operation. ``error`` is what it will end with; ``ends`` None: stuck."""

    id: str
    what: str
    ends: float | None
    error: dict[str, Any] | None = None
    status: str = "InProgress"
    stuck: bool = False
    apply: Callable[[], None] = lambda: None


@dataclass(slots=True, kw_only=True)
class Node:
    id: str
    number: int
    state: str
    """idle, running, preparing, unusable, leaving, preempted: the words of `listNodes`."""
    since: float
    allocated: float
    job: str | None = None


@dataclass(slots=True, kw_only=True)
class Stay:
    """A node, as it was paid for."""

    compute: str
    node: str
    vm_size: str
    tier: str
    start: float
    end: float | None = None
    jobs: list[list[Any]] = field(default_factory=list)
    """[job, start, end or None], one after the other."""

    def minutes(self, now: float) -> float:
        return ((now if self.end is None else self.end) - self.start) / 60


@dataclass(slots=True, kw_only=True)
class Compute:
    name: str
    body: dict[str, Any]
    """As it was PUT."""
    created: float
    modified: float
    state: str = "Creating"
    """provisioningState: Creating, Updating, Deleting, Succeeded, Failed, Canceled."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Of provisioning."""
    allocation_errors: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    """Errors of one that is Succeeded, and will never have a node."""
    allocation_changed: float | None = None
    nodes: list[Node] = field(default_factory=list)
    numbered: int = 0
    operation: Operation | None = None
    """The last one."""
    asked: float = 0.0
    """When the autoscaler asked last for nodes that it did not get."""

    @property
    def _settings(self) -> dict[str, Any]:
        return self.body["properties"].get("properties") or {}

    @property
    def _scale(self) -> dict[str, Any]:
        return self._settings.get("scaleSettings") or {}

    @property
    def vm_size(self) -> str:
        return listed_name(self._settings.get("vmSize") or "Standard_DS3_v2")

    @property
    def tier(self) -> str:
        return "low_priority" if (self._settings.get("vmPriority") or "").lower() == "lowpriority" else "dedicated"

    @property
    def min_nodes(self) -> int:
        return self._scale.get("minNodeCount") or 0

    @property
    def max_nodes(self) -> int:
        found = self._scale.get("maxNodeCount")
        return 4 if found is None else found

    @property
    def idle_seconds(self) -> float:
        return duration_seconds(self._scale.get("nodeIdleTimeBeforeScaleDown") or "PT2M")

    @property
    def live(self) -> list[Node]:
        """Nodes that are paid for."""
        return [node for node in self.nodes if node.state in ("idle", "running", "preparing", "leaving")]

    @property
    def usable(self) -> list[Node]:
        """Nodes that are there to work, now or soon."""
        return [node for node in self.nodes if node.state in ("idle", "running", "preparing")]


@dataclass(slots=True, kw_only=True)
class Asset:
    """A version of a code, an environment or a model, as it was PUT."""

    kind: str
    name: str
    version: str
    body: dict[str, Any]
    created: float
    modified: float


@dataclass(slots=True, kw_only=True)
class Request:
    """A request that was seen."""

    at: float
    operation: str
    method: str
    path: str
    query: dict[str, str]
    body: Any
    status: int | None = None
    fault: str | None = None
    action: str = ""
    """As roles name it."""
    request_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    """As it is in the answer's header."""


@dataclass(slots=True, kw_only=True)
class Addresses:
    """Where things listen, once they do. ``base``: the ARM surface; ``storage``: the account, path style."""

    base: str = ""
    control: str = ""
    storage: str = ""
    storage_suffix: str = ""


@dataclass(slots=True, kw_only=True)
class Cloud:
    """All of it."""

    folder: Path
    faults: Faults
    clock: Clock = field(default_factory=Clock)
    granted: list[str] = field(default_factory=list)
    """Patterns of actions that each identity has beside those of its roles."""
    denied: list[str] = field(default_factory=list)
    """Patterns of actions that no identity has, whatever its roles say."""
    timing: Timing = field(default_factory=Timing)
    addresses: Addresses = field(default_factory=Addresses)
    sizes: dict[str, Size] = field(default_factory=read_sizes)
    datastore_auth: str = "key"
    """How the workspace's datastores reach the storage account: ``key``, ``sas`` or ``identity``."""
    quota: dict[str, int] = field(default_factory=dict)
    """vCPUs by family; ``low_priority`` and ``dedicated``: all of that tier together; ``low_priority:FAMILY``: what is
    shown for a family there. A family that is not here has `DEFAULT_QUOTA`."""
    operations: dict[str, Operation] = field(default_factory=dict)
    computes: dict[str, Compute] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    assets: dict[tuple[str, str, str], Asset] = field(default_factory=dict)
    """By kind, name and version."""
    stays: list[Stay] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def begin(
        self, what: str, seconds: float, apply: Callable[[], None], error: dict[str, Any] | None = None
    ) -> Operation:
        """Start a long-running operation; ``apply`` is called when it ends, well or not."""
        stuck = self.faults.stuck(what)
        made = Operation(
            id=str(uuid.uuid4()),
            what=what,
            ends=None if stuck else self.clock.now() + seconds,
            stuck=stuck,
            error=error,
            apply=apply,
        )
        self.operations[made.id] = made
        return made

    def end_operations(self) -> None:
        """Those that are due."""
        now = self.clock.now()
        for operation in list(self.operations.values()):
            if operation.status == "InProgress" and operation.ends is not None and now >= operation.ends:
                operation.status = "Failed" if operation.error else "Succeeded"
                operation.apply()


DEFAULT_QUOTA = 1000


def quota_of(cloud: Cloud, family: str, tier: str) -> int:
    return cloud.quota.get("low_priority" if tier == "low_priority" else family, DEFAULT_QUOTA)


def total_quota_of(cloud: Cloud, tier: str) -> int:
    return cloud.quota.get(tier, DEFAULT_QUOTA if tier == "low_priority" else 10 * DEFAULT_QUOTA)


def used_cores(cloud: Cloud, family: str, tier: str) -> int:
    """vCPUs of nodes that are there now, in the family (dedicated) or in the whole tier (low priority)."""
    return sum(
        cloud.sizes[compute.vm_size].vcpus * len(compute.live)
        for compute in cloud.computes.values()
        if compute.tier == tier and (tier == "low_priority" or cloud.sizes[compute.vm_size].family == family)
    )

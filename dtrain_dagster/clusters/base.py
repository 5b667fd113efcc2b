"""What a cluster is, whichever kind it is: the `GPUClusterManager` interface and the data that crosses it.

A cluster runs one command on N nodes and says when each node was there. What the command does, and how it is followed,
is the run directory's business (`trainer.rundir`).
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal

from dtrain_dagster.costs.usage import NodeUsage
from trainer.errors import DamagedError
from trainer.rundir import RunDir

OWNER = "owner.json"
"""In a run directory: the Dagster run that started or followed the job last; None once a person has gone on with it.
Absent for jobs that only the command line has known."""


class ClusterError(RuntimeError):
    """The cluster cannot do what was asked. The message names the setting and the remedy."""


class NoCapacityError(ClusterError):
    """There are no nodes to be had now. Nothing was bought; asking again later may help."""

    def __init__(self, message: str, attempts: tuple[dict[str, Any], ...], retry_at: float) -> None:
        super().__init__(message)
        self.attempts = attempts
        """What was tried, in order: sku, tier, node_count, code, message, decision, at."""
        self.retry_at = retry_at
        """The earliest time at which asking again is sensible. Unix seconds."""


class InUseError(ClusterError):
    """Somebody wants it by now: it is neither ended nor given back."""


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """A provisioned cluster."""

    cluster_name: str
    node_count: int
    gpu_type: str
    """SKU, such as ``Standard_NC6s_v3``. On the local cluster: the SKU whose price stands in."""
    auto_scale_enabled: bool
    min_nodes: int
    max_nodes: int
    idle_timeout_minutes: int
    processes_per_node: int = 1
    tier: str | None = None
    """Tier that was got, where the cluster decides; None: the one that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHealth:
    node_id: int
    healthy: bool
    message: str = ""
    """What is wrong, or what the node is doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterHealth:
    cluster_name: str
    healthy: bool
    nodes: tuple[NodeHealth, ...]
    running_jobs: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One command on N nodes."""

    job_id: str
    run_dir: str
    command: tuple[str, ...]
    """Runs once per process, with torchrun's variables set (RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE…)."""
    node_count: int
    processes_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of every process. It is written to ``launch.json``: no secrets here."""
    master_port: int | None = None
    """Port of rank 0; None picks a free one."""
    elastic: bool = False
    """The command can go on without a node and take in one that comes later, as ``python -m trainer`` does; its
    processes find ``DTRAIN_LAUNCH`` and ``DTRAIN_STAY`` in their environment. If not, whichever fails ends the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    job_id: str
    state: JobState
    message: str = ""
    """Why it failed, with the last lines of the log of the process that failed first."""
    nodes_alive: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    damage: str = ""
    """What is wrong with its run directory, where it cannot be read; ``state`` is then what is seen from outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orphan:
    """Something that costs money, or may, and that no live run owns."""

    kind: Literal["job", "compute"]
    name: str
    """Under which whoever runs it knows it."""
    reason: str
    job_id: str | None = None
    dagster_run_id: str | None = None
    """The run that wanted it last."""
    state: str = ""
    """In the words of whoever runs it."""
    since: float | None = None
    """When it was submitted; Unix seconds."""
    node_count: int = 0
    sku: str = ""
    tier: str | None = None
    """Tier that is paid for, where the cluster decides; None: the one that was asked for."""
    studio_url: str | None = None
    is_busy: bool = False
    """Work that this project does not know is on it, so it may be told and never ended."""
    used_at: float | None = None
    """Of a compute: when the cluster was used last, as it was when this was found (`NodePool.used_at`)."""

    def refuse_new_owner(self, rundir: RunDir) -> None:
        """`InUseError` for a job that somebody has taken over since it was found."""
        try:
            known = rundir.read_json(OWNER)
        except DamagedError as error:
            raise InUseError(f"whose job {self.job_id} is cannot be told: {error}") from None
        if known is not None and known["dagster_run_id"] != self.dagster_run_id:
            by = f"run {known['dagster_run_id']}" if known["dagster_run_id"] else "a person"
            raise InUseError(f"job {self.job_id} is followed by {by} by now")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePool:
    """Nodes of one kind, which cost money for as long as they are there."""

    name: str
    sku: str
    tier: str | None = None
    """Tier that is paid for, where the cluster decides; None: the one that was asked for."""
    states: Mapping[str, int]
    """How many nodes are in which state, in the words of whoever runs them."""
    node_count: int
    """Those of them that are paid for."""
    work: tuple[str, ...] = ()
    """What starts, runs, waits or is being saved here, whosever it is."""
    used_at: float | None = None
    """When the cluster was last provisioned, or got a job, or a job of it ended; Unix seconds."""
    trouble: str = ""
    """Why its nodes do not go by themselves; "" where they should, or where nodes never do."""
    grace_seconds: float = 0.0
    """For so long it may idle beyond the limit: whoever runs it takes idle nodes away, and is about to."""


class GPUClusterManager(ABC):
    """Provisions a cluster and runs jobs on it. Every method can be called again without harm."""

    home: Path
    """Folder of this orchestrator on this machine, which nodes of the cloud cannot reach."""
    python: ClassVar[str] = sys.executable
    """What its nodes call Python."""
    poll_seconds: float = 0.5
    """Between two looks at a job that is followed."""
    attempts: Sequence[Any] = ()
    """What the last `provision_cluster` tried, in order, where nodes are bought: dataclasses, for people to read."""

    @abstractmethod
    def provision_cluster(self, node_count: int, gpu_type: str) -> ClusterConfig:
        """Have ``node_count`` nodes of ``gpu_type`` ready to run jobs. `ClusterError` if that cannot be."""

    @abstractmethod
    def scale_cluster(self, target_nodes: int) -> bool:
        """Change the number of nodes that the next jobs get. True if it changed."""

    @abstractmethod
    def monitor_health(self) -> ClusterHealth:
        """How each node is now."""

    @abstractmethod
    def pools(self) -> list[NodePool]:
        """The nodes that there are, whoever uses them. `ClusterError` where that cannot be told now."""

    @abstractmethod
    def scale_down(self, pool: NodePool, force: bool = False) -> bool:
        """Give the nodes of a pool back that was seen without work; whoever wants to use it meanwhile waits. False if
        it was asked for and nodes are still there: look again. ``force``: also where that did not help before. It
        returns within a minute. `InUseError`, and nothing is changed, where somebody has used it since it was seen."""

    @abstractmethod
    def cleanup_cluster(self) -> None:
        """Cancel what runs and give the cluster back. Run directories stay."""

    @abstractmethod
    def submit_job(self, spec: JobSpec) -> None:
        """Start the job, unless one of this id runs already or has succeeded: submitting twice never buys twice.
        A failed or cancelled job of this id is started again in its run directory, as its next launch."""

    @abstractmethod
    def job_status(self, job_id: str) -> JobStatus:
        """Where the job stands. `ClusterError` for an unknown id."""

    def wait(self, seen: JobStatus) -> None:
        """Until the next look at a job that is followed: `poll_seconds`, or less where it is known at once that its
        state is no longer the one that was ``seen``."""
        time.sleep(self.poll_seconds)

    @abstractmethod
    def list_jobs(self, prefix: str = "") -> list[JobStatus]:
        """All jobs that this cluster knows and whose id begins so, newest first. It opens all their run directories."""

    @abstractmethod
    def active_jobs(self) -> list[JobStatus]:
        """Jobs that have not ended, newest first. It takes as long whatever the number of those that have."""

    @abstractmethod
    def cancel_job(self, job_id: str) -> None:
        """Stop every process of the job: in order (SIGTERM), then by force. Returns when none is left."""

    @abstractmethod
    def job_logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
        """What the processes printed: of one node or of all, the last ``tail`` lines of each or everything."""

    @abstractmethod
    def node_usage(self, job_id: str) -> list[NodeUsage]:
        """When each node was there for this job, over all launches; a node still there counts until now."""

    @abstractmethod
    def find_orphans(self, live_runs: Collection[str]) -> list[Orphan]:
        """What no live run owns. ``live_runs``: ids of the Dagster runs that have not ended. A job that was started
        without Dagster belongs to a person, and is none. `ClusterError` where that cannot be told now."""

    @abstractmethod
    def end_orphan(self, orphan: Orphan) -> bool:
        """Stop what an orphan spends. False if its end was asked for and is not there yet: ask again. It returns within
        half a minute, since a sensor has one. `InUseError`, and nothing is ended, where somebody wants it by now."""

"""The interface of every kind of cluster: `GPUClusterManager` and the data that crosses it.

A cluster runs one command on N nodes and records when each node was present. What the command does, and how its
progress is followed, belongs to the run directory (`trainer.rundir`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from dtrain_dagster.clusters.hosts import HostRecord
from dtrain_dagster.costs.usage import NodeUsage
from trainer.documents.schemas import whole
from trainer.errors import DamagedError
from trainer.rundir import RunDir

if TYPE_CHECKING:
    from dtrain_dagster.clusters.submission import Request

OWNER = "owner.json"
"""The file of a run directory that names the Dagster run which started or followed the job last; its value is None once
a person has continued the job. It is absent for jobs that only the command line has started."""


class ClusterError(RuntimeError):
    """The cluster cannot do what was asked. The message names the setting and the remedy."""


class NoCapacityError(ClusterError):
    """No nodes are available now. Nothing was bought; a later request may succeed."""

    def __init__(
        self, message: str, attempts: tuple[dict[str, Any], ...], retry_at: float, since: float | None = None
    ) -> None:
        super().__init__(message)
        self.attempts = attempts
        """The attempts, in order: sku, tier, node_count, code, message, decision, at."""
        self.retry_at = retry_at
        """The earliest time at which asking again is sensible. Unix seconds."""
        self.since = since
        """The time since which a job has waited for nodes; None where none was submitted. Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Starved:
    """The wait of a job that has ended because no nodes came for it. Times are Unix seconds."""

    since: float
    """The time at which it began to wait."""
    retry_at: float
    """The earliest time at which asking again is sensible."""


class InUseError(ClusterError):
    """Somebody uses the job or cluster again, so it is neither ended nor given back."""


class JobState(StrEnum):
    """The state of a job, as a person reads it and as ``status.json`` has it."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Return whether a job in this state has ended."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """A provisioned cluster."""

    cluster_name: str
    node_count: Annotated[int, whole(1)]
    gpu_type: str
    """SKU, such as ``Standard_NC6s_v3``. On the local cluster: the SKU whose price is used as a stand-in."""
    auto_scale_enabled: bool
    min_nodes: int
    max_nodes: int
    idle_timeout_minutes: int
    processes_per_node: Annotated[int, whole(1)] = 1
    tier: str | None = None
    """Tier that was bought, where the cluster decides; None: the tier that was requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHealth:
    """The health of one node."""

    node_id: int
    healthy: bool
    message: str = ""
    """The fault, or what the node is doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterHealth:
    """The health of a cluster and of each of its nodes."""

    cluster_name: str
    healthy: bool
    nodes: tuple[NodeHealth, ...]
    running_jobs: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One command that runs on N nodes."""

    job_id: str
    run_dir: str
    command: tuple[str, ...]
    """The command, run once per process with torchrun's variables set (RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE…)."""
    node_count: int
    processes_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment of every process. They are written to ``launch.json``: no secrets here."""
    master_port: int | None = None
    """Port of rank 0; None picks a free one."""
    script: str = ""
    """The path of a script of this machine that the command runs. Where code is sent to nodes, it goes along with what
    it imports, and is run by its name. Empty for another command."""
    keep_failed_seconds: float = 0.0
    """How long a node whose processes failed is left in place for a person; 0: not at all."""
    elastic: bool = False
    """Whether the command can continue without a node and take in one that comes later, as ``python -m trainer`` does;
    its processes are told (`trainer.runtime.launch.Launch`). If not, any process that fails ends the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """The state of a job, with its reason and times."""

    job_id: str
    state: JobState
    message: str = ""
    """The reason for which the job failed, with the last log lines of the process that failed first."""
    nodes_alive: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    kept: tuple[str, ...] = ()
    """A line for each node that is left in place though the job has failed: until when, and how to enter it."""
    damage: str = ""
    """The damage of the run directory if it cannot be read; ``state`` is then the one seen from outside."""
    starved: Starved | None = None
    """The wait of a job that has ended because no nodes came; None for any other."""

    def refuse_starved(self) -> None:
        """Raise `NoCapacityError` where the job has ended because no nodes came: its run may wait and ask again."""
        if self.starved is not None:
            raise NoCapacityError(f"job {self.job_id}: {self.message}", (), self.starved.retry_at, self.starved.since)


@dataclass(frozen=True, kw_only=True, slots=True)
class Orphan:
    """A job that costs money, or may, and that no live run owns."""

    name: str
    """The name under which the service that runs it knows it."""
    reason: str
    job_id: str | None = None
    dagster_run_id: str | None = None
    """The run that requested it last."""
    state: str = ""
    """The state, in the words of the service that runs it."""
    since: float | None = None
    """Time of submission; Unix seconds."""
    node_count: int = 0
    sku: str = ""
    tier: str | None = None
    """Tier that is paid for, where the cluster decides; None: the tier that was requested."""
    studio_url: str | None = None

    def refuse_new_owner(self, rundir: RunDir) -> None:
        """Raise `InUseError` if somebody has taken over the job since it was found."""
        try:
            known = rundir.read_json(OWNER)
        except DamagedError as error:
            raise InUseError(f"the owner of job {self.job_id} cannot be determined: {error}") from None
        if known is not None and known["dagster_run_id"] != self.dagster_run_id:
            by = f"run {known['dagster_run_id']}" if known["dagster_run_id"] else "a person"
            raise InUseError(f"job {self.job_id} is now followed by {by}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePool:
    """Nodes of one kind, which cost money for as long as they exist."""

    name: str
    sku: str
    tier: str | None = None
    """Tier that is paid for, where the cluster decides; None: the tier that was requested."""
    states: Mapping[str, int]
    """Number of nodes by state, in the words of the service that runs them."""
    node_count: int
    """Number of the nodes that are paid for."""
    work: tuple[str, ...] = ()
    """Work that starts, runs, waits or is being saved here, of any owner."""
    used_at: float | None = None
    """The last time at which the cluster was provisioned, was given a job, or a job of it ended; Unix seconds."""
    trouble: str = ""
    """The reason for which its nodes are not removed automatically; "" if they should be, or if nodes always stay."""
    grace_seconds: float = 0.0
    """Idle time allowed beyond the limit, because the service that removes idle nodes is about to do so."""


class GPUClusterManager(ABC):
    """A cluster that can be provisioned and that runs jobs. Every method can be called again without harm."""

    home: Path
    """Folder of this orchestrator on this machine; nodes in the cloud cannot reach it."""
    python: str = sys.executable
    """The command that starts Python on its nodes."""
    poll_seconds: float = 0.5
    """Seconds between two looks at a job that is followed."""
    attempts: Sequence[Any] = ()
    """The attempts of the last `provision_cluster`, in order, where nodes are bought: dataclasses, for people to
    read."""
    brings_nodes_later: ClassVar[bool] = False
    """Whether nodes come only for a submitted job, if they come; else `provision_cluster` has them ready."""

    @abstractmethod
    def provision_cluster(self, node_count: int, gpu_type: str) -> ClusterConfig:
        """Make ``node_count`` nodes of ``gpu_type`` ready to run jobs. Raise `ClusterError` if that is impossible."""

    @abstractmethod
    def scale_cluster(self, target_nodes: int) -> bool:
        """Change the number of nodes that the next jobs get. Return whether it changed."""

    @abstractmethod
    def monitor_health(self) -> ClusterHealth:
        """Return the present health of the cluster and of each node."""

    @abstractmethod
    def pools(self) -> list[NodePool]:
        """Return the nodes that exist, of any user. Raise `ClusterError` where they cannot be listed now."""

    @abstractmethod
    def scale_down(self, pool: NodePool) -> bool:
        """Give back the nodes of a pool that was seen without work; anyone who wants to use it meanwhile waits.

        Return False if the removal was requested and nodes still exist: look again. The call returns within a minute.
        Raise `InUseError`, and change nothing, where somebody has used the pool since it was seen.
        """

    @abstractmethod
    def cleanup_cluster(self) -> None:
        """Cancel the running jobs and give the cluster back. Run directories stay."""

    @abstractmethod
    def submit_job(self, spec: JobSpec) -> None:
        """Start the job, unless a job of this id runs already or has succeeded: a second submission never buys twice. A
        failed or cancelled job of this id is started again in its run directory, as its next launch."""

    def describe_submission(self, spec: JobSpec, gpu_type: str, job: Mapping[str, Any] | None = None) -> list[Request]:
        """Return what `provision_cluster` and `submit_job` would ask for now, without asking for it, or writing
        anything. ``job``: the ``job.json`` that the run directory would have. Raise `ClusterError` where the start
        would be refused."""
        raise ClusterError("a start on this kind of cluster cannot be shown beforehand")

    @abstractmethod
    def job_status(self, job_id: str) -> JobStatus:
        """Return the status of the job. Raise `ClusterError` for an unknown id."""

    @abstractmethod
    def list_jobs(self, prefix: str = "") -> list[JobStatus]:
        """Return all jobs of this cluster whose id begins with ``prefix``, newest first. It opens all their run
        directories."""

    @abstractmethod
    def active_jobs(self) -> list[JobStatus]:
        """Return the jobs that have not ended, newest first. Its duration does not depend on the number of ended
        jobs."""

    @abstractmethod
    def cancel_job(self, job_id: str) -> None:
        """Stop every process of the job: first with SIGTERM, then by force. Return when none is left."""

    @abstractmethod
    def job_logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
        """Return the output of the processes, of one node or of all: the last ``tail`` lines of each log, or all
        lines."""

    @abstractmethod
    def node_usage(self, job_id: str) -> list[NodeUsage]:
        """Return when each node was present for this job, over all launches; a node still present counts until now."""

    def host_record(self) -> HostRecord | None:
        """Return what happened on the hosts of this cluster; None where it does not choose hosts for its nodes."""
        return None

    @abstractmethod
    def find_orphans(self, live_runs: Collection[str]) -> list[Orphan]:
        """Return the jobs that no live run owns. ``live_runs``: ids of the Dagster runs that have not
        ended. A job that was started without Dagster belongs to a person and is no orphan. Raise `ClusterError` where
        this cannot be determined now."""

    @abstractmethod
    def end_orphan(self, orphan: Orphan) -> bool:
        """Stop the spending of an orphan. Return False if its end was requested and has not happened yet: ask again.
        The call returns within half a minute, the time that a sensor has. Raise `InUseError`, and end nothing, where
        somebody uses it again."""

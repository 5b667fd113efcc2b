"""Azure ML behind the `GPUClusterManager` interface: nodes of any available kind, and jobs that are bought once.

Thin: `provision` gets nodes, `controller` controls a job. No request is made until a method needs it, and all state is
in the run directories and in the service.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dtrain_dagster.clusters.azure_ml.client import Service, ServiceError
from dtrain_dagster.clusters.azure_ml.controller import JobController
from dtrain_dagster.clusters.azure_ml.jobs import JOB_TAG, LAUNCH_TAG, RUN_DIR_TAG, RUN_TAG, Jobs
from dtrain_dagster.clusters.azure_ml.launch_record import Launches, job_name, mark_of, next_launch, read_mark
from dtrain_dagster.clusters.azure_ml.provision import (
    BROKEN,
    MOVING,
    NODES_THERE,
    TIMED_OUT,
    Provisioned,
    Provisioner,
)
from dtrain_dagster.clusters.azure_ml.sku_chain import Attempt, SkuChoice, spell_sku
from dtrain_dagster.clusters.azure_ml.states import ServiceJob
from dtrain_dagster.clusters.base import (
    OWNER,
    ClusterConfig,
    ClusterError,
    ClusterHealth,
    GPUClusterManager,
    InUseError,
    JobSpec,
    JobState,
    JobStatus,
    NodeHealth,
    NodePool,
    Orphan,
)
from dtrain_dagster.clusters.job_code import factories_in
from dtrain_dagster.clusters.job_marks import ActiveJobs, ClusterUse
from dtrain_dagster.clusters.submission import Request
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.azure import AzureMLOptions
from dtrain_dagster.support.audit import AuditLog
from dtrain_dagster.support.secrets import redact
from trainer.documents.reader import read_document, warn_once
from trainer.documents.schemas import make, record_of
from trainer.errors import DamagedError
from trainer.rundir import STATUS, RunDir
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

T = TypeVar("T")
CLUSTER = "cluster.json"
ANYWHERE = ""
"""Compute of a job that waits for its next launch: it may be any."""
LEAVING_SECONDS = 180.0
"""Seconds that the service may take to remove nodes whose idle time is over."""
READERS = 16
"""Run directories that are read at the same time."""
SUBMITTING_SECONDS = 3600.0
"""Age from which a mark without a launch was left by a process that died."""


class AzureMLClusterManager(GPUClusterManager):
    """A cluster in one workspace. Any number of manager objects, in any process, see the same cluster and jobs.

    ``home``: folder of the audit log. ``dagster_run_id``: the run that it works for; jobs that it follows are that
    run's. With ``tends=False`` looking at jobs buys and ends nothing, and only notes what has ended (what the service
    denies for minutes is cancelled first): it is for sensors and lists.
    """

    python = "python"
    brings_nodes_later: ClassVar[bool] = True

    def __init__(
        self, options: AzureMLOptions, home: Path, dagster_run_id: str | None = None, tends: bool = True
    ) -> None:
        self.options, self.dagster_run_id, self.tends = options, dagster_run_id, tends
        self.home = Path(home)
        self.poll_seconds = options.poll_seconds
        self.cluster_name, self.processes_per_node = options.cluster_name, options.processes_per_node
        self.audit = AuditLog(Path(home), dagster_run_id)
        self.service = Service(options)
        self.provisioner = Provisioner(self.service, self.audit)
        self.jobs = Jobs(self.service, self.audit)
        self.attempts: Sequence[Attempt] = ()
        """The attempts of the last `provision_cluster`, in order; for a refused one, see its `NoCapacityError`."""
        self._controllers: dict[str, JobController] = {}

    @property
    def jobs_uri(self) -> str:
        """Return the address of the run directories."""
        return self.options.jobs_uri

    def provision_cluster(self, node_count: int, gpu_type: str) -> ClusterConfig:
        if node_count < 1:
            raise ClusterError(f"DTRAIN_NODES={node_count}: a cluster needs at least one node; set 1 or more")
        self.provisioner.require_region()
        self._use.begin("provisioning")
        got = self.provisioner.provision(node_count, gpu_type)
        self.attempts = got.attempts
        self._write(got)
        self._use.begin("provisioned")
        return self._config(got)

    def scale_cluster(self, target_nodes: int) -> bool:
        got = self._got()
        if got is None:
            raise ClusterError(f"cluster {self.cluster_name!r} is not provisioned: there is nothing to scale")
        if target_nodes < 0:
            raise ClusterError(f"cluster {self.cluster_name!r} cannot have {target_nodes} nodes: give 0 or more")
        if target_nodes == got.max_nodes == got.node_count:
            return False
        if target_nodes != got.max_nodes:
            if self.provisioner.settled(got.compute) is None:
                raise ClusterError(f"compute {got.compute} is gone: provision the cluster again")
            choice = SkuChoice(sku=got.sku, tier=got.tier)
            if refusal := self.provisioner.put(choice, got.compute, target_nodes):
                raise ClusterError(f"{got.compute} cannot have {target_nodes} nodes: {refusal.code}: {refusal.message}")
        self._write(replace(got, node_count=target_nodes, max_nodes=target_nodes))
        return True

    def monitor_health(self) -> ClusterHealth:
        """Return the health of the nodes as the service sees them, over all computes of this cluster. A cluster at rest
        has none, and is healthy; an unreachable one is not."""
        try:
            computes = self.provisioner.computes()
            listed = [(name, *node) for name in computes for node in self.provisioner.nodes(name)]
        except ServiceError as error:
            return ClusterHealth(cluster_name=self.cluster_name, healthy=False, nodes=(), message=str(error))
        broken = "; ".join(f"{it.name} is {it.state}" for it in computes.values() if it.state in BROKEN)
        nodes = tuple(
            NodeHealth(
                node_id=index,
                healthy=state in NODES_THERE | {"leaving"},
                message=f"{node} of {name}: {state}" + (f", works on {job}" if job else ""),
            )
            for index, (name, node, state, job) in enumerate(listed)
        )
        return ClusterHealth(
            cluster_name=self.cluster_name,
            healthy=not broken and all(node.healthy for node in nodes),
            nodes=nodes,
            running_jobs=tuple(status.job_id for status in self.active_jobs()),
            message=broken or ("" if computes else "not provisioned"),
        )

    def cleanup_cluster(self) -> None:
        """Cancel the running jobs and delete all computes of this cluster. The error names what cannot be ended, after
        all else has been."""
        problems: list[str] = []

        def attempt(end: Callable[..., T], *of: str) -> T | None:
            try:
                return end(*of)
            except ClusterError as error:
                problems.append(str(error))
                return None

        for status in self.list_jobs():
            if not status.state.is_final:
                attempt(self.cancel_job, status.job_id)
        for name in attempt(self.provisioner.computes) or ():
            attempt(self.provisioner.delete, name)
        if problems:
            raise ClusterError("; ".join(problems))
        self._state.delete(CLUSTER)

    def describe_submission(self, spec: JobSpec, gpu_type: str, job: Mapping[str, Any] | None = None) -> list[Request]:
        self._refuse_spec(spec)
        self.provisioner.require_region()
        got, compute = self.provisioner.preview(spec.node_count, gpu_type)
        record = next_launch(self._record(spec.job_id), spec, got, self.cluster_name, self.dagster_run_id)
        return [compute, self.jobs.preview(record, factories_in(job))]

    def _refuse_spec(self, spec: JobSpec) -> None:
        """Raise `ClusterError` for a job that cannot be submitted here; keep the script of any other."""
        expected = f"{self.jobs_uri}/{spec.job_id}"
        if spec.run_dir.rstrip("/") != expected:
            raise ClusterError(f"this cluster keeps job {spec.job_id!r} in {expected}, not in {spec.run_dir}")
        if not spec.command:
            raise ClusterError(f"job {spec.job_id!r} has no command to run")
        if spec.node_count < 1 or spec.processes_per_node < 1:
            raise ClusterError(f"job {spec.job_id!r} asks for {spec.node_count} nodes: it needs one or more")
        refuse_secrets(spec.env)
        if spec.script:
            self.jobs.scripts[spec.job_id] = spec.script

    def submit_job(self, spec: JobSpec) -> None:
        self._refuse_spec(spec)
        if self._got() is not None:
            self._use.begin(spec.job_id)
        got = self._got()
        if got is None:
            raise ClusterError(f"cluster {self.cluster_name!r} is not provisioned: call provision_cluster first")
        if spec.node_count > got.max_nodes:
            raise ClusterError(
                f"job {spec.job_id!r} asks for {spec.node_count} nodes, and {got.compute} grows to {got.max_nodes}: "
                "provision that many"
            )
        self._controller(spec.job_id).submit(spec, replace(got, node_count=spec.node_count))

    def job_status(self, job_id: str) -> JobStatus:
        return self._known(job_id).look()

    def list_jobs(self, prefix: str = "") -> list[JobStatus]:
        """Return the jobs without acting on them: a job that has lost its nodes is continued by the process that
        follows it."""
        return self._peek_all([name for name in open_storage(self.jobs_uri).list() if name.startswith(prefix)])

    def active_jobs(self) -> list[JobStatus]:
        """Return the active jobs without acting on them, as `list_jobs` does."""
        if (marks := self._active.marks()) is None:
            marks = [self._mark(job.job_id) for job in self.list_jobs() if not job.state.is_final]
            self._active.complete()
        found = self._peek_all(list(dict.fromkeys(read_mark(mark)[0] for mark in marks)))
        ended = {job.job_id: job.ended_at for job in found if job.state.is_final}
        there, damaged = {job.job_id for job in found}, {job.job_id for job in found if job.damage}
        for mark in marks:
            job_id, launch = read_mark(mark)
            if job_id in damaged:
                continue  # it may go on to cost money: its mark stays
            if job_id in ended and self._controller(job_id, tends=False).has_ended(launch):
                self._use.note(ended[job_id] or time.time(), job_id)
                self._active.leave(mark)
            elif job_id not in there and time.time() - self._active.entered_at(mark) > SUBMITTING_SECONDS:
                self._active.leave(mark)
        return [job for job in found if not job.state.is_final]

    def pools(self) -> list[NodePool]:
        """Return one pool for each compute of this cluster. Jobs of others are seen by their nodes."""
        work, used_at, found = self._work(), self._use.used_at(), []
        with self.service.looking():
            seen = [(compute, self.provisioner.nodes(name)) for name, compute in self.provisioner.computes().items()]
        for compute, nodes in seen:
            states = Counter(state for _, state, _ in nodes)
            trouble, grace = why_nodes_stay(compute.state, compute.min_nodes, self.options.operation_seconds)
            at_work = [*work.get(ANYWHERE, ()), *work.get(compute.name, ()), *busy(nodes)]
            found.append(
                NodePool(
                    name=compute.name,
                    sku=spell_sku(compute.size),
                    tier=compute.tier,
                    states=dict(sorted(states.items())),
                    node_count=sum(states[state] for state in NODES_THERE),
                    work=tuple(dict.fromkeys(at_work)),
                    used_at=used_at,
                    trouble=trouble,
                    grace_seconds=grace,
                )
            )
        return found

    def scale_down(self, pool: NodePool) -> bool:
        """Delete the compute, which the next purchase makes again. Raise `InUseError` where anybody uses it, of all
        users: their work would end with it."""
        name = pool.name
        with self._use.giving_back(pool.used_at) as check, self.service.looking():
            work = self._work()
            if at_work := [*work.get(ANYWHERE, ()), *work.get(name, ())]:
                raise InUseError(f"{', '.join(at_work)} is at work already")
            if self.provisioner.settled(name, 0.0) is None:  # one answer may be wrong: the list decides
                is_gone = name not in self.provisioner.computes()
            else:
                check()
                nodes = self.provisioner.nodes(name)
                if at_work := self.jobs.on_compute(name) or busy(nodes, ("running", "preparing")):
                    raise InUseError(f"compute {name} is at work already: {', '.join(at_work)}")
                is_gone = self._delete_compute(name)
            got = self._got()
            if is_gone and got is not None and got.compute == name:
                self._state.delete(CLUSTER)
        return is_gone

    def _delete_compute(self, name: str) -> bool:
        """Delete a compute with its nodes; return whether it is gone within the patience of a look."""
        try:
            self.provisioner.delete(name, self.options.look_patience_seconds)
        except ServiceError as error:
            if error.code not in (TIMED_OUT, "NotDeleted"):
                raise
            return False
        return True

    def _work(self) -> dict[str, list[str]]:
        """Return the jobs that have not ended, by compute."""
        found: dict[str, list[str]] = {}
        for status in self.active_jobs():
            record = self._record(status.job_id) if status.state is JobState.RUNNING and not status.damage else None
            found.setdefault(record["compute"] if record else ANYWHERE, []).append(status.job_id)
        return found

    def cancel_job(self, job_id: str) -> None:
        self._known(job_id).cancel()

    def job_logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
        texts = self._known(job_id).logs()
        if node_id is not None and node_id not in texts:
            raise ClusterError(f"job {job_id!r} has no log of a node {node_id}; nodes count from 0")
        parts = []
        for node in sorted(texts) if node_id is None else [node_id]:
            lines = texts[node].rstrip("\n").splitlines()
            text = "\n".join(lines if tail is None else lines[max(0, len(lines) - tail) :])
            parts.append(text if node_id is not None else f"=== node-{node}.log ===\n{text}")
        return "\n".join(parts)

    def node_usage(self, job_id: str) -> list[NodeUsage]:
        controller = self._known(job_id)
        running = not controller.look().state.is_final
        return controller.usage(controller.launches.read()[1] or {}, running, time.time())

    def find_orphans(self, live_runs: Collection[str]) -> list[Orphan]:
        """Return the orphaned jobs with this cluster's tag. Computes without work are `pools`."""
        with self.service.looking():
            active = self.jobs.active()
        judged = [judge_job(job, self.jobs_uri, live_runs) for job in active]
        return [orphan for orphan in judged if orphan is not None]

    def end_orphan(self, orphan: Orphan) -> bool:
        deadline = time.monotonic() + self.options.look_patience_seconds
        if orphan.job_id:
            orphan.refuse_new_owner(RunDir(f"{self.jobs_uri}/{orphan.job_id}"))
            if (self._record(orphan.job_id) or {}).get("job_name") == orphan.name:
                self._known(orphan.job_id).ask_to_cancel()
        # Also where its run directory says that it has ended: only the service knows whether it still costs money.
        with self.service.looking():
            return self.jobs.end(orphan.name, orphan.reason, deadline)

    def _mark(self, job_id: str) -> str:
        """Mark a job that was found to run, and return the mark."""
        try:
            launch = (self._record(job_id) or {"launch": 1})["launch"]
        except DamagedError:
            launch = 1
        mark = mark_of(job_id, launch)
        self._active.enter(mark)
        return mark

    def _controller(self, job_id: str, tends: bool | None = None) -> JobController:
        rundir = RunDir(f"{self.jobs_uri}/{job_id}")
        if tends is False:
            return JobController(rundir, self.provisioner, self.jobs, self._active, None, tends=False)
        if job_id not in self._controllers:
            self._controllers[job_id] = JobController(
                rundir, self.provisioner, self.jobs, self._active, self.dagster_run_id, self.tends
            )
        return self._controllers[job_id]

    def _known(self, job_id: str) -> JobController:
        if self._record(job_id) is None:
            raise ClusterError(f"no job {job_id!r} on cluster {self.cluster_name!r}; `dtrain jobs` lists them")
        return self._controller(job_id)

    def _record(self, job_id: str) -> dict[str, Any] | None:
        record = Launches(RunDir(f"{self.jobs_uri}/{job_id}")).read()[1]
        return record if record is not None and record.get("cluster_name") == self.cluster_name else None

    def _peek_all(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Return the statuses, that of the last submission first, without the ids that are no jobs."""
        with ThreadPoolExecutor(READERS) as pool:
            found = [job for job in pool.map(self._peek, job_ids) if job is not None]
        return [status for _, status in sorted(found, key=lambda job: job[0], reverse=True)]

    def _peek(self, job_id: str) -> tuple[float, JobStatus] | None:
        try:
            if (record := self._record(job_id)) is not None:
                return record["submitted_at"], self._controller(job_id, tends=False).look()
        except DamagedError as error:  # whether it runs, only the service can tell; no job hides the others
            message = f"damaged: {error}"
            return 0.0, JobStatus(job_id=job_id, state=JobState.FAILED, message=message, damage=str(error))
        except (NotADirectoryError, ValueError):  # something that is no job
            pass
        return None

    @property
    def _state(self) -> Storage:
        return open_storage(f"{self.options.root_uri}/clusters/{self.cluster_name}")

    @property
    def _use(self) -> ClusterUse:
        return ClusterUse(self._state)

    @property
    def _active(self) -> ActiveJobs:
        return ActiveJobs(f"{self._state.uri}/active")

    def _got(self) -> Provisioned | None:
        """Return the last provisioned nodes, of any process."""
        data = read_document(self._state, CLUSTER, record_of(Provisioned))
        return None if data is None else make(Provisioned, data)

    def _write(self, got: Provisioned) -> None:
        self._state.write(CLUSTER, json.dumps(asdict(got), indent=2).encode())

    def _config(self, got: Provisioned) -> ClusterConfig:
        return ClusterConfig(
            cluster_name=self.cluster_name,
            node_count=got.node_count,
            gpu_type=got.sku,
            tier=got.tier,
            auto_scale_enabled=True,
            min_nodes=0,
            max_nodes=got.max_nodes,
            idle_timeout_minutes=max(1, round(self.options.idle_seconds / 60)),
            processes_per_node=self.processes_per_node,
        )


def refuse_secrets(env: Mapping[str, str]) -> None:
    """Raise `ClusterError` for a variable that looks like a secret: everyone who sees a job sees its environment."""
    for name, value in env.items():
        if redact({name: value}) != {name: value}:
            raise ClusterError(
                f"the job's environment has {name}, which looks like a secret, and everybody who sees a job in Azure "
                "ML sees its environment: let the nodes' identity read it from Key Vault instead"
            )


def busy(nodes: Sequence[tuple[str, str, str | None]], states: Collection[str] = ("running",)) -> list[str]:
    """Return the jobs of nodes that have one, and the nodes in these states. Pure."""
    return [job or node for node, state, job in nodes if state in states or job]


def why_nodes_stay(state: str, minimum: int, operation_seconds: float) -> tuple[str, float]:
    """Return why idle nodes are not removed automatically, "" where they should be, and the seconds that this may take.
    Pure."""
    if state in BROKEN:
        return f"it is {state}", 0.0
    if state in MOVING:
        return f"it is {state}", operation_seconds
    if minimum > 0:
        return f"it keeps {minimum} nodes even when there is no work", 0.0
    return "", LEAVING_SECONDS


def why_orphaned(
    name: str, record: Mapping[str, Any] | None, is_settled: bool, owner: str | None, live_runs: Collection[str]
) -> str:
    """Return why a job that runs in the service has no owner; "" if it has one. Pure.

    ``record``: ``launch.json`` of its run directory, None if there is none; ``is_settled``: the run directory says that
    the job has ended; ``owner``: the Dagster run that followed it last, None for a job without one, which a person
    owns.
    """
    if record is None:
        return "its run directory is gone"
    if record.get("job_name") != name:
        return f"launch {record.get('launch')} ({record.get('job_name')}) has taken its place"
    if is_settled:
        return "its run directory says that it has ended"
    if record.get("cancel_asked_at"):
        return "it should have been cancelled"
    if owner is not None and owner not in live_runs:
        return f"no live Dagster run follows it; the last was {owner}"
    return ""


def judge_job(job: ServiceJob, jobs_uri: str, live_runs: Collection[str]) -> Orphan | None:
    """Return a job that runs in the service as an orphan, by its run directory; None where it has an owner, or was not
    submitted by an orchestrator that keeps its run directories at ``jobs_uri``.

    The tags alone do not tell the latter: a copy that a person makes of a job in the Studio has its tags, and a name of
    its own.
    """
    job_id, launch = job.tags.get(JOB_TAG, ""), job.tags.get(LAUNCH_TAG, "")
    is_ours = job_id and launch.isdecimal() and job.tags.get(RUN_DIR_TAG) == f"{jobs_uri}/{job_id}"
    if not is_ours or job.name != job_name(job_id, int(launch)):
        return None
    rundir = RunDir(f"{jobs_uri}/{job_id}")
    try:
        record = Launches(rundir).read()[1]
        status = rundir.read_json(STATUS) or {}
        owner = (rundir.read_json(OWNER) or {"dagster_run_id": job.tags.get(RUN_TAG)})["dagster_run_id"]
    except DamagedError as error:  # it may have an owner, so it is not ended: a person has to look
        warn_once(f"{job.name} runs, and its owner cannot be determined: {error}")
        return None
    known = record or {}
    settled = status.get("launch") == known.get("launch", 0) and JobState(status["state"]).is_final
    reason = why_orphaned(job.name, record, settled, owner, live_runs)
    if not reason:
        return None
    return Orphan(
        name=job.name, reason=reason, job_id=job_id, dagster_run_id=owner, state=job.status,
        since=job.created_at, node_count=known.get("node_count", 0), sku=known.get("sku", ""),
        tier=known.get("tier", ""), studio_url=job.studio_url,
    )  # fmt: skip

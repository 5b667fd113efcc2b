"""The clusters whose jobs have a supervisor: this machine, and an engine that runs nodes for us (SLURM, Kubernetes or
Ray), which is chosen by the kind of cluster.

The size of such a cluster is one small file of ours; its nodes come with each job, and everything about a job is in its
run directory. A supervisor's own work is in `supervision.supervisor`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
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
from dtrain_dagster.clusters.hosts import HostRecord
from dtrain_dagster.clusters.job_code import code_of, factories_in, stage_code, with_code
from dtrain_dagster.clusters.job_marks import ActiveJobs, ClusterUse
from dtrain_dagster.clusters.kubernetes.engine import KubernetesEngine
from dtrain_dagster.clusters.notices import describe_kept
from dtrain_dagster.clusters.ray.engine import RayEngine
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.submission import DRAWN, Request, others_like_first, shell_line
from dtrain_dagster.clusters.supervision.engine import Engine, agent_command
from dtrain_dagster.clusters.supervision.launch import (
    LaunchSettings,
    SupervisorError,
    acquire_job_lock,
    end_supervised,
    is_final,
    launch_document,
    observe,
    options_file,
    outlives_supervisor,
    settle_status,
    start_supervisor,
    sweep,
)
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.cluster_kinds import KINDS
from dtrain_dagster.settings.engines import ENGINE_SETTINGS
from dtrain_dagster.settings.environment import MOST_NODES
from dtrain_dagster.settings.home import HomeError, make_home
from dtrain_dagster.support.job_lock import is_held, undisturbed
from trainer.comm.launch_secret import write_private
from trainer.documents.places import PlaceError, checked_id
from trainer.documents.reader import MARK_BYTES, read_document, warn_once
from trainer.documents.schemas import make, record_of
from trainer.errors import DamagedError
from trainer.node.environment import Seat
from trainer.node.line_log import last_lines, logs_of, text_of
from trainer.node.node_processes import environment_of
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir
from trainer.storage.open import open_storage

RANKS_PER_CORE = 8
"""The most processes that this machine is asked to carry, for each of its cores."""
END_SECONDS = 25.0
"""Seconds for which one tick of a sensor waits for the end of an orphan."""
CLUSTER = "cluster.json"
DEFAULTS = LaunchSettings()
NEVER_STARTED = "it never started: its submitter ended before it could; submit it again"


class SupervisedClusterManager(GPUClusterManager):
    """A cluster whose state is in ``<home>/clusters/<kind>.<cluster_name>``, and whose jobs are in
    ``<home>/storage/jobs/<job_id>``. Any number of manager objects, in any process, see the same cluster and jobs. Jobs
    of other clusters are in that folder, too: each can be looked at and ended by its name, and is in no list here."""

    def __init__(
        self,
        home: Path,
        settings: LaunchSettings = DEFAULTS,
        processes_per_node: int = 1,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        """``engine_options``: those of the engine, which the supervisor gets and no job can change."""
        self.home, self.cluster_name = Path(home).absolute(), settings.cluster_name
        self.processes_per_node = processes_per_node
        self.settings, self.engine_options = settings, engine_options
        self.folder = self.home / "storage" / "jobs"
        self.state = open_storage(str(self.home / "clusters" / settings.cluster_key))
        self.use, self.active = ClusterUse(self.state), ActiveJobs(f"{self.state.uri}/active")

    def check_size(self, node_count: int, processes_per_node: int) -> None:
        """Raise `ClusterError` for a size that this cluster cannot have."""
        for setting, value in (("DTRAIN_NODES", node_count), ("DTRAIN_PROCESSES_PER_NODE", processes_per_node)):
            if value < 1:
                raise ClusterError(f"{setting}={value}: at least one is needed; set 1 or more")

    @property
    @abstractmethod
    def most_nodes(self) -> int:
        """The largest number of nodes that this cluster is asked for."""

    @abstractmethod
    def preview_launch(self, launch: Mapping[str, Any], rundir: RunDir, secret: Path) -> list[Request]:
        """Return what is asked for when this launch begins. ``secret``: the file that its supervisor would have."""

    def provision_cluster(self, node_count: int, gpu_type: str) -> ClusterConfig:
        self.check_size(node_count, self.processes_per_node)
        self.use.begin("provisioned")
        config = ClusterConfig(
            cluster_name=self.cluster_name,
            node_count=node_count,
            gpu_type=gpu_type,
            auto_scale_enabled=True,
            min_nodes=0,
            max_nodes=self.most_nodes,
            idle_timeout_minutes=10,
            processes_per_node=self.processes_per_node,
        )
        self._write(config)
        return config

    def scale_cluster(self, target_nodes: int) -> bool:
        config = self._config()
        if config is None:
            raise ClusterError(f"cluster {self.cluster_name!r} is not provisioned: there is nothing to scale")
        if not config.min_nodes <= target_nodes <= config.max_nodes:
            raise ClusterError(
                f"{target_nodes} nodes are outside {config.min_nodes} to {config.max_nodes}, the limits of cluster "
                f"{self.cluster_name!r}"
            )
        if target_nodes == config.node_count:
            return False
        self._write(replace(config, node_count=target_nodes))
        return True

    def monitor_health(self) -> ClusterHealth:
        """Return the health of each node: one that a running job has lost, or that is silent, is unhealthy."""
        config = self._config()
        running = [status.job_id for status in self.active_jobs()]
        damaged: list[str] = []
        seen: dict[int, list[NodeHealth]] = {node_id: [] for node_id in range(config.node_count if config else 0)}
        for job_id in running:
            try:
                views = presences.job_health(self.rundir(job_id), job_id, time.time())
            except DamagedError as error:
                damaged.append(str(error))
                continue
            for view in views:
                seen.setdefault(view.node_id, []).append(view)
        nodes = tuple(
            NodeHealth(
                node_id=node_id,
                healthy=all(view.healthy for view in views),
                message="; ".join(view.message for view in views) or "ready",
            )
            for node_id, views in sorted(seen.items())
        )
        return ClusterHealth(
            cluster_name=self.cluster_name,
            healthy=all(node.healthy for node in nodes) and not damaged,
            nodes=nodes,
            running_jobs=tuple(running),
            message="; ".join([*([] if config else ["not provisioned"]), *damaged]),
        )

    def pools(self) -> list[NodePool]:
        """Return one pool; none where nothing is provisioned and nothing runs."""
        config, jobs = self._config(), self.active_jobs()
        at_work = sum(job.nodes_alive for job in jobs)
        nodes = max(at_work, config.node_count if config else 0)
        if not nodes and not jobs:
            return []
        return [
            NodePool(
                name=self.cluster_name,
                sku=config.gpu_type if config else self.settings.sku,
                states={"running": at_work, "idle": nodes - at_work},
                node_count=nodes,
                work=tuple(job.job_id for job in jobs),
                used_at=self.use.used_at(),
            )
        ]

    def scale_down(self, pool: NodePool) -> bool:
        """Forget the cluster: it has no nodes without a job. Every run directory is opened before, whatever the marks
        say."""
        with self.use.giving_back(pool.used_at):
            if running := self._mark_running():
                raise InUseError(f"{', '.join(running)} runs by now")
            self.state.delete(CLUSTER)
        return True

    def cleanup_cluster(self) -> None:
        running = self._mark_running()
        for job_id in running:
            with contextlib.suppress(DamagedError, ClusterError, OSError):  # what is wrong is told below
                self._end(job_id, 0.0)  # all are asked at once, then each is waited for
        for job_id in running:
            self.cancel_job(job_id)
        self.state.delete(CLUSTER)

    def describe_submission(self, spec: JobSpec, gpu_type: str, job: Mapping[str, Any] | None = None) -> list[Request]:
        self.check_size(spec.node_count, spec.processes_per_node)
        folder = self._expect_folder(spec)
        rundir = RunDir(str(folder))
        launch = launch_document(spec, self.settings, folder, rundir)
        launch["token"] = launch["token"][: -len(DRAWN)] + DRAWN
        code = KINDS[self.settings.engine].code
        staged = code_of(self.home / "code", factories_in(job))[0] if code == "staged" else None
        return self.preview_launch(with_code(launch, staged, code), rundir, self._secret(spec.job_id))

    def submit_job(self, spec: JobSpec) -> None:
        self.check_size(spec.node_count, spec.processes_per_node)
        folder = self._expect_folder(spec)
        if not spec.command:
            raise ClusterError(f"job {spec.job_id!r} has no command to run")
        rundir = RunDir(str(folder))
        with contextlib.suppress(HomeError):  # what is wrong with it is said below
            make_home(self.home)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = acquire_job_lock(folder, rundir)
            if lock is None:
                return
            try:
                goes_on = (status := rundir.read_json(STATUS)) is not None and not is_final(status)
                if goes_on and outlives_supervisor(rundir.read_json(LAUNCH) or {}):
                    self._supervise_again(rundir, lock)  # its nodes go on
                    return
                status = settle_status(rundir)
                if status is None or status["state"] != JobState.SUCCEEDED:
                    self._launch(spec, folder, rundir, lock)
            finally:
                os.close(lock)  # the supervisor has its own copy
        except OSError as error:
            raise ClusterError(
                f"cannot write the run directory {folder}: {error.strerror or error}; make room there or set "
                "DTRAIN_HOME to a folder that can be written"
            ) from error

    def job_status(self, job_id: str) -> JobStatus:
        rundir = self.rundir(job_id)
        trouble = ""
        try:  # a job whose nodes outlived their supervisor gets another one here
            status, running = observe(rundir, partial(self._supervise_again, rundir))
        except SupervisorError as error:  # its nodes go on, and the next look tries again
            status, running, trouble = rundir.read_json(STATUS), True, str(error)
        if status is None:
            launch = rundir.read_json(LAUNCH)
            if launch is None:
                raise ClusterError(
                    f"no job {job_id!r} on cluster {self.settings.cluster_name!r}; `dtrain jobs` lists them"
                )
            state, message = (JobState.QUEUED, "starting") if running else (JobState.FAILED, NEVER_STARTED)
            return JobStatus(job_id=job_id, state=state, message=message, started_at=launch.get("submitted_at"))
        state = JobState(status["state"])
        newest = [] if state.is_final else presences.find_latest_presences(rundir.nodes(skip_damaged=True))
        return JobStatus(
            job_id=job_id,
            state=state,
            message=trouble or status["message"],
            nodes_alive=sum(node.ended_at is None for node in newest),
            started_at=status["started_at"],
            ended_at=status["ended_at"],
            kept=() if state.is_final else tuple(describe_kept(status.get("kept") or ())),
        )

    def list_jobs(self, prefix: str = "") -> list[JobStatus]:
        names = [name for name in open_storage(str(self.folder)).list() if name.startswith(prefix)]
        return _newest_first(self._peek(name) for name in names)

    def active_jobs(self) -> list[JobStatus]:
        if (marks := self.active.marks()) is None:
            marks = self._mark_running()
            self.active.complete()
        found = {job_id: self._peek(job_id) for job_id in marks}
        for job_id, status in found.items():
            if status is None or status.state.is_final:
                self._forget(job_id, None if status is None else status.ended_at)
        return _newest_first(status for status in found.values() if status is not None and not status.state.is_final)

    def cancel_job(self, job_id: str) -> None:
        self._end(job_id, math.inf)

    def job_logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
        self.job_status(job_id)  # is there such a job?
        paths = logs_of(self.folder / job_id / LOGS, node_id)
        if node_id is not None and not paths:
            raise ClusterError(f"job {job_id!r} has no log of a node {node_id}; nodes count from 0")
        parts = []
        for path in paths.values():
            text = text_of(path).rstrip("\n") if tail is None else last_lines(path, tail)
            parts.append(text if node_id is not None else f"=== {path.name} ===\n{text}")
        return "\n".join(parts)

    def node_usage(self, job_id: str) -> list[NodeUsage]:
        running = not self.job_status(job_id).state.is_final
        rundir = self.rundir(job_id)
        sku = (rundir.read_json(LAUNCH) or {}).get("sku", self.settings.sku)
        return presences.usage(rundir.nodes(), sku, running, time.time())

    def find_orphans(self, live_runs: Collection[str]) -> list[Orphan]:
        found = []
        for status in self.active_jobs():
            rundir = self.rundir(status.job_id)
            try:
                owner = (rundir.read_json(OWNER) or {}).get("dagster_run_id")
                launch = rundir.read_json(LAUNCH) or {}
            except DamagedError as error:  # its owner cannot be determined, so no run may end it
                warn_once(str(error))
                continue
            if owner is None or owner in live_runs:
                continue
            found.append(
                Orphan(
                    name=status.job_id,
                    reason=f"no live Dagster run follows it; the last was {owner}",
                    job_id=status.job_id,
                    dagster_run_id=owner,
                    state=status.state,
                    since=status.started_at,
                    node_count=launch.get("node_count", 0),
                    sku=launch.get("sku", self.settings.sku),
                )
            )
        return found

    def end_orphan(self, orphan: Orphan) -> bool:
        orphan.refuse_new_owner(self.rundir(orphan.name))
        return self._end(orphan.name, END_SECONDS)

    def rundir(self, job_id: str) -> RunDir:
        """Return the run directory of a job. Raise `ClusterError` for an id that cannot be one."""
        try:
            checked_id(job_id, "the id of the job")
        except PlaceError as error:
            raise ClusterError(str(error)) from None
        return RunDir(str(self.folder / job_id))

    # ---

    def _config(self) -> ClusterConfig | None:
        found = read_document(self.state, CLUSTER, record_of(ClusterConfig), MARK_BYTES)
        return None if found is None else make(ClusterConfig, found)

    def _write(self, config: ClusterConfig) -> None:
        self.state.write(CLUSTER, json.dumps(asdict(config), indent=2).encode())

    def _launch(self, spec: JobSpec, folder: Path, rundir: RunDir, lock: int) -> None:
        """Mark the job as active, describe its next launch and start it."""
        self.active.enter(spec.job_id)
        self.use.begin(spec.job_id)
        rundir.storage.delete(STATUS)  # from here on, only the new supervisor says how the job stands
        code = KINDS[self.settings.engine].code
        launch = launch_document(spec, self.settings, folder, rundir)
        launch = with_code(launch, stage_code(self.home / "code", rundir) if code == "staged" else None, code)
        secret = self._secret(spec.job_id)
        if self.engine_options is not None:
            write_private(options_file(secret), json.dumps(self.engine_options))
        start_supervisor(launch, rundir, lock, secret)

    def _supervise_again(self, rundir: RunDir, lock: int) -> None:
        """Start another supervisor for a job whose nodes outlived theirs. Raise `ClusterError` where it does not
        start."""
        launch = rundir.read_json(LAUNCH)
        if launch is not None:
            start_supervisor(launch, rundir, lock, self._secret(launch["job_id"]), resumes=True)

    def _mark_running(self) -> list[str]:
        """Return the ids of the jobs that have not ended, and mark them; every run directory is opened."""
        found = [job.job_id for job in self.list_jobs() if not job.state.is_final]
        for job_id in found:
            self.active.enter(job_id)
        return found

    def _secret(self, job_id: str) -> Path:
        """Return the file for the secret of a job's launches."""
        return self.home / "secrets" / job_id

    def _peek(self, job_id: str) -> JobStatus | None:
        """Return the status of a job; for an unreadable one its damage, so that no job hides the others. None for what
        is no job, or was launched on another cluster last; a job whose launch cannot be read may be ours."""
        with contextlib.suppress(DamagedError, ClusterError, OSError):
            if not self.settings.has(self.rundir(job_id).read_json(LAUNCH) or {}):
                return None
        try:
            return self.job_status(job_id)
        except (ClusterError, NotADirectoryError):
            return None
        except (DamagedError, OSError) as error:
            held = False
            with contextlib.suppress(OSError):
                held = is_held(self.folder / job_id)
            state = JobState.RUNNING if held else JobState.FAILED
            return JobStatus(job_id=job_id, state=state, message=f"damaged: {error}", damage=str(error))

    def _forget(self, job_id: str, ended_at: float | None) -> None:
        """Remove the mark of a job that has ended, and the secrets that a killed supervisor has left, unless the job is
        being started again."""
        with undisturbed(self.folder / job_id) as is_free:
            if is_free:
                if ended_at is not None:
                    self.use.note(ended_at, job_id)
                    for path in (secret := self._secret(job_id), options_file(secret)):
                        path.unlink(missing_ok=True)
                self.active.leave(job_id)

    def _end(self, job_id: str, patience_seconds: float) -> bool:
        """Request the end of a job and wait at most that long for it; return whether it has ended."""
        rundir = self.rundir(job_id)
        folder = rundir.storage.local_path()
        try:
            self.job_status(job_id)  # is there such a job?
            rundir.read_json(STATUS)
        except DamagedError:
            if not is_held(folder):
                raise
            sweep(rundir.read_json(LAUNCH) or {}, folder)  # its supervisor cannot be asked to end it in order
            return not is_held(folder)
        return end_supervised(rundir, patience_seconds, partial(self._supervise_again, rundir))

    def _expect_folder(self, spec: JobSpec) -> Path:
        storage = open_storage(spec.run_dir)
        expected = self.folder / spec.job_id
        if not storage.is_local or storage.local_path().resolve() != expected.resolve():
            raise ClusterError(
                f"the {KINDS[self.settings.engine].words} keeps job {spec.job_id!r} in {expected}, not in "
                f"{spec.run_dir}"
            )
        return expected


def _newest_first(jobs: Iterable[JobStatus | None]) -> list[JobStatus]:
    return sorted(filter(None, jobs), key=lambda job: job.started_at or 0.0, reverse=True)


class LocalClusterManager(SupervisedClusterManager):
    """A cluster on this machine."""

    def check_size(self, node_count: int, processes_per_node: int) -> None:
        super().check_size(node_count, processes_per_node)
        ranks = node_count * processes_per_node
        if ranks > _most_ranks():
            raise ClusterError(
                f"DTRAIN_NODES={node_count} x DTRAIN_PROCESSES_PER_NODE={processes_per_node} is {ranks} processes on "
                f"{os.cpu_count()} cores; the local cluster takes at most {RANKS_PER_CORE} per core, "
                f"{_most_ranks()} here: set fewer"
            )

    def preview_launch(self, launch: Mapping[str, Any], rundir: RunDir, secret: Path) -> list[Request]:
        per_node, count = launch["processes_per_node"], launch["node_count"]
        port = launch["master_port"] or "a free port"
        seat = Seat(node_id=0, master_port=0, secret=str(secret))
        lines = []
        for local_rank in range(per_node):
            _, whole = environment_of(launch, seat, local_rank, {}, os.environ)
            own = {name: value for name, value in whole.items() if os.environ.get(name) != value}
            lines.append(shell_line(launch["command"], own | {"MASTER_PORT": port}))
        more = "" if per_node == 1 else f" * {per_node} + LOCAL_RANK"
        others = others_like_first(count, f"with NODE_RANK, GROUP_RANK = K and RANK = K{more}")
        title = "node 0: its processes on this machine, with these variables besides those of this shell"
        return [Request(title=title, form="sh", text="\n".join([*lines, *([others] if others else [])]))]

    @property
    def most_nodes(self) -> int:
        return _most_ranks() // self.processes_per_node


def _most_ranks() -> int:
    return RANKS_PER_CORE * (os.cpu_count() or 1)


class EngineClusterManager(SupervisedClusterManager):
    """A cluster whose nodes are one-node jobs of an engine. They come only for a submitted job."""

    brings_nodes_later = True

    def __init__(
        self, home: Path, settings: LaunchSettings, engine_options: Mapping[str, Any], processes_per_node: int = 1
    ) -> None:
        super().__init__(home, settings, processes_per_node, engine_options)
        self.python = engine_options.get("python") or self.python

    def check_size(self, node_count: int, processes_per_node: int) -> None:
        super().check_size(node_count, processes_per_node)
        if node_count > MOST_NODES:
            words = KINDS[self.settings.engine].words
            raise ClusterError(f"DTRAIN_NODES={node_count}: the {words} is asked for 1 to {MOST_NODES} nodes")

    def host_record(self) -> HostRecord | None:
        return HostRecord.of_cluster(self.home, self.settings.cluster_key)

    def preview_launch(self, launch: Mapping[str, Any], rundir: RunDir, secret: Path) -> list[Request]:
        engine = open_engine(self.settings.engine, self.engine_options or {}, rundir.uri, str(secret))
        return engine.describe(launch)

    @property
    def most_nodes(self) -> int:
        return MOST_NODES


ENGINE_CLASSES: Mapping[str, type[Engine]] = {"slurm": SlurmEngine, "kubernetes": KubernetesEngine, "ray": RayEngine}
"""Kind of cluster → what runs its nodes."""


def open_engine(kind: str, options: Mapping[str, Any], run_dir: str, secret: str) -> Engine:
    """Return the engine of a kind of cluster, for the nodes of one job. ``options``: of
    `dtrain_dagster.settings.engines`. ``secret``: the path of the file with the launch's secret. Raise `ClusterError`
    for a kind without one."""
    if (engine := ENGINE_CLASSES.get(kind)) is None:
        raise ClusterError(f"DTRAIN_CLUSTER={kind!r} has no engine that runs nodes")
    if unknown := sorted(options.keys() - ENGINE_SETTINGS[kind].model_fields.keys()):
        raise ClusterError(f"{', '.join(unknown)}: no options of {kind} in this version; submit the job again")

    def command(launch: Mapping[str, Any], node_id: int, incarnation: int) -> Sequence[str]:
        python = options.get("python") or sys.executable
        return agent_command(launch, run_dir, secret, node_id, incarnation, python, engine.hold_seconds)

    return engine(ENGINE_SETTINGS[kind].of(options), run_dir, command)

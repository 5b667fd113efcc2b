"""The jobs of a cluster whose nodes a supervisor tends: submit, look at, list, cancel and bill them.

Everything about a job is in its run directory, so any number of objects, in any process, see the same jobs. The cluster
itself (its size, its pool) belongs in `manager`, a supervisor's own work in `supervisor`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import OWNER, ClusterError, JobSpec, JobState, JobStatus, Orphan
from dtrain_dagster.clusters.job_code import stage_code
from dtrain_dagster.clusters.job_marks import ActiveJobs, ClusterUse
from dtrain_dagster.clusters.launch_place import BEFORE, place_of
from dtrain_dagster.clusters.supervision.private_files import PrivateFiles
from dtrain_dagster.clusters.supervision.settle import (
    Revive,
    acquire_job_lock,
    end_supervised,
    has_ended,
    observe,
    outlives_supervisor,
    settle_status,
    signal_supervisor,
    sweep,
    wait_for_change,
)
from dtrain_dagster.clusters.supervision.submit import SupervisorError, describe_launch, start_supervisor
from dtrain_dagster.costs.usage import NodeUsage
from dtrain_dagster.settings.cluster_kinds import KINDS, cluster_key
from dtrain_dagster.settings.home import HomeError, make_home
from dtrain_dagster.support.job_lock import is_held, undisturbed
from trainer.documents.places import PlaceError, checked_id
from trainer.documents.reader import warn_once
from trainer.errors import DamagedError
from trainer.node.line_log import last_lines, logs_of, text_of
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir
from trainer.storage.base import Storage
from trainer.storage.open import open_storage

NEVER_STARTED = "it never started: its submitter ended before it could; submit it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """What a cluster's settings add to ``launch.json`` of its jobs."""

    engine: str = "local"
    """The kind of cluster, see `dtrain_dagster.settings.cluster_kinds`."""
    cluster_name: str = "local"
    sku: str = "Standard_NC6s_v3"
    """The SKU of its nodes, or the one whose price stands in."""
    threads_per_rank: int | None = None
    """Sets OMP_NUM_THREADS; None: cores / ranks."""
    max_replacements: int = 6
    """Lost nodes that are replaced, for a job that regroups."""
    replacement_delay_seconds: float = 1.0
    """Seconds that a node is gone before another takes its place."""
    successor_lead_seconds: float = 0.0
    """Seconds before a node's time limit at which its successor is submitted."""

    @property
    def cluster_key(self) -> str:
        """What tells the cluster apart among those of all kinds that share a home."""
        return cluster_key(self.engine, self.cluster_name)

    def has(self, launch: Mapping[str, Any]) -> bool:
        """Return whether this is the launch of a job of this cluster."""
        return all(launch.get(name, getattr(self, name)) == getattr(self, name) for name in ("engine", "cluster_name"))


class SupervisedJobs:
    """The jobs of one cluster, in ``<home>/storage/jobs/<job_id>``. Those of other clusters are there, too: each can be
    looked at and ended by its name, and is in no list of this one."""

    def __init__(
        self, home: Path, settings: LaunchSettings, state: Storage, engine_options: Mapping[str, Any] | None = None
    ) -> None:
        """``state``: the folder of the cluster. ``engine_options``: those of the engine, which the supervisor gets and
        no job can change."""
        self.home, self.settings, self.engine_options = home, settings, engine_options
        self.folder = home / "storage" / "jobs"
        self.use, self.active = ClusterUse(state), ActiveJobs(f"{state.uri}/active")

    def submit(self, spec: JobSpec) -> None:
        """Start the job, as `GPUClusterManager.submit_job` says."""
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
                if not has_ended(rundir) and outlives_supervisor(rundir.read_json(LAUNCH) or {}):
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

    def _launch(self, spec: JobSpec, folder: Path, rundir: RunDir, lock: int) -> None:
        """Mark the job as active, describe its next launch and start it."""
        self.active.enter(spec.job_id)
        self.use.begin(spec.job_id)
        rundir.storage.delete(STATUS)  # from here on, only the new supervisor says how the job stands
        before = rundir.read_json(LAUNCH)
        launch = describe_launch(spec, folder, rundir) | asdict(self.settings)
        if before is not None:
            launch[BEFORE] = place_of(before)
        code = KINDS[self.settings.engine].code
        if code == "staged":
            launch["env"] |= {"PYTHONPATH": stage_code(self.home / "code", rundir)}
        elif code == "image":  # folders of this machine mean nothing in it
            launch["env"].pop("PYTHONPATH", None)
        files = self._private_files(spec.job_id)
        if self.engine_options is not None:
            files.write_options(self.engine_options)
        start_supervisor(launch, rundir, lock, files.secret)

    def _supervise_again(self, rundir: RunDir, lock: int) -> None:
        """Start another supervisor for a job whose nodes outlived theirs. Raise `ClusterError` where it does not
        start."""
        launch = rundir.read_json(LAUNCH)
        if launch is not None:
            start_supervisor(launch, rundir, lock, self._private_files(launch["job_id"]).secret, resumes=True)

    def _revive(self, rundir: RunDir) -> Revive:
        return lambda lock: self._supervise_again(rundir, lock)

    def _private_files(self, job_id: str) -> PrivateFiles:
        return PrivateFiles(self.home, job_id)

    def status(self, job_id: str) -> JobStatus:
        """Return the status of the job, as `GPUClusterManager.job_status` says. A job whose nodes outlived their
        supervisor gets another one here."""
        rundir = self.rundir(job_id)
        trouble = ""
        try:
            status, running = observe(rundir, self._revive(rundir))
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
        alive = (
            0
            if state.is_final
            else sum(node.ended_at is None for node in presences.find_latest_presences(rundir.nodes(True)))
        )
        return JobStatus(
            job_id=job_id,
            state=state,
            message=trouble or status["message"],
            nodes_alive=alive,
            started_at=status["started_at"],
            ended_at=status["ended_at"],
        )

    def wait(self, seen: JobStatus, seconds: float) -> None:
        """Wait until the state of the job is another than in ``seen``, at most that long."""
        wait_for_change(self.rundir(seen.job_id), seen.state, seconds)

    def list_jobs(self, prefix: str = "") -> list[JobStatus]:
        """Return all jobs of this cluster whose id begins with ``prefix``, newest first."""
        jobs = []
        for name in open_storage(str(self.folder)).list():
            if name.startswith(prefix) and self._is_own(name):
                with contextlib.suppress(ClusterError, NotADirectoryError):  # something that is no job
                    jobs.append(self._peek(name))
        return sorted(jobs, key=lambda job: job.started_at or 0.0, reverse=True)

    def running(self) -> list[str]:
        """Return the ids of the jobs that have not ended; every run directory is opened, whatever the marks say."""
        return [job.job_id for job in self.list_jobs() if not job.state.is_final]

    def _is_own(self, job_id: str) -> bool:
        """Return whether a job was launched here last. One whose launch cannot be read may be."""
        with contextlib.suppress(DamagedError, ClusterError, OSError):
            return self.settings.has(self.rundir(job_id).read_json(LAUNCH) or {})
        return True

    def list_active(self) -> list[JobStatus]:
        """Return this cluster's jobs that have not ended, newest first, in a time that does not depend on the ended
        ones."""
        if (marks := self.active.marks()) is None:
            marks = self.running()
            for job_id in marks:
                self.active.enter(job_id)
            self.active.complete()
        jobs = []
        for job_id in marks:
            try:
                status = self._peek(job_id)
            except (ClusterError, NotADirectoryError):  # its run directory is gone, or is just being made
                self._forget(job_id, None)
            else:
                if not self._is_own(job_id):  # it goes on elsewhere
                    self._forget(job_id, None)
                elif status.state.is_final:
                    self._forget(job_id, status.ended_at)
                else:
                    jobs.append(status)
        return sorted(jobs, key=lambda job: job.started_at or 0.0, reverse=True)

    def _peek(self, job_id: str) -> JobStatus:
        """Return the status of a job; for an unreadable one its damage, so that no job hides the others."""
        try:
            return self.status(job_id)
        except NotADirectoryError:
            raise
        except (DamagedError, OSError) as error:
            held = False
            with contextlib.suppress(OSError):
                held = is_held(self.folder / job_id)
            state = JobState.RUNNING if held else JobState.FAILED
            return JobStatus(job_id=job_id, state=state, message=f"damaged: {error}", damage=str(error))

    def _forget(self, job_id: str, ended_at: float | None) -> None:
        """Remove the mark of a job that has ended, unless it is being started again."""
        with undisturbed(self.folder / job_id) as is_free:
            if is_free:
                if ended_at is not None:
                    self.use.note_end(ended_at, job_id)
                self.active.leave(job_id)

    def ask_to_end(self, job_id: str) -> None:
        """Request the end of a job, and do not wait for it."""
        with contextlib.suppress(DamagedError):  # it is ended by `end`, otherwise
            signal_supervisor(self.rundir(job_id), signal.SIGTERM)

    def end(self, job_id: str, patience_seconds: float = math.inf) -> bool:
        """Request the end of a job and wait at most that long for it; return whether it has ended."""
        rundir = self.rundir(job_id)
        folder = rundir.storage.local_path()
        try:
            self.status(job_id)  # is there such a job?
            rundir.read_json(STATUS)
        except DamagedError:
            if not is_held(folder):
                raise
            sweep(rundir.read_json(LAUNCH) or {}, folder)  # its supervisor cannot be asked to end it in order
            return not is_held(folder)
        return end_supervised(rundir, patience_seconds, self._revive(rundir))

    def logs(self, job_id: str, node_id: int | None = None, tail: int | None = None) -> str:
        """Return the output of the processes, as `GPUClusterManager.job_logs` says."""
        self.status(job_id)  # is there such a job?
        paths = logs_of(self.folder / job_id / LOGS, node_id)
        if node_id is not None and not paths:
            raise ClusterError(f"job {job_id!r} has no log of a node {node_id}; nodes count from 0")
        parts = []
        for path in paths.values():
            text = text_of(path).rstrip("\n") if tail is None else last_lines(path, tail)
            parts.append(text if node_id is not None else f"=== {path.name} ===\n{text}")
        return "\n".join(parts)

    def usage(self, job_id: str) -> list[NodeUsage]:
        """Return when each node was present for this job, as `GPUClusterManager.node_usage` says."""
        running = not self.status(job_id).state.is_final
        rundir = self.rundir(job_id)
        sku = (rundir.read_json(LAUNCH) or {}).get("sku", self.settings.sku)
        return presences.usage(rundir.nodes(), sku, running, time.time())

    def find_orphans(self, live_runs: Collection[str]) -> list[Orphan]:
        """Return the jobs that no live run owns, as `GPUClusterManager.find_orphans` says."""
        found = []
        for status in self.list_active():
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
                    kind="job",
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

    def rundir(self, job_id: str) -> RunDir:
        """Return the run directory of a job. Raise `ClusterError` for an id that cannot be one."""
        try:
            checked_id(job_id, "the id of the job")
        except PlaceError as error:
            raise ClusterError(str(error)) from None
        return RunDir(str(self.folder / job_id))

    def _expect_folder(self, spec: JobSpec) -> Path:
        storage = open_storage(spec.run_dir)
        expected = self.folder / spec.job_id
        if not storage.is_local or storage.local_path().resolve() != expected.resolve():
            raise ClusterError(
                f"the {KINDS[self.settings.engine].words} keeps job {spec.job_id!r} in {expected}, not in "
                f"{spec.run_dir}"
            )
        return expected

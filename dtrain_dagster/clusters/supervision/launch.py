"""The supervisor of a job as other processes see it: its launch is described, it is started, watched and ended, and
what it could not write is written for it. Its own work is in `supervisor`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import ClusterError, JobSpec, JobState
from dtrain_dagster.clusters.notices import tell
from dtrain_dagster.settings.cluster_kinds import cluster_key
from dtrain_dagster.support.job_lock import LOCK, acquire, is_held
from trainer.node.environment import STOP_GRACE
from trainer.node.line_log import last_lines
from trainer.node.processes import MARK, command_of, has_open, kill_all, marked, parent_of, signal_if
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir

SWEEP_SECONDS = 10.0
"""Seconds that processes may take to die whose supervisor was killed."""
POLL_SECONDS = 0.02
FORCE_SECONDS = 15.0
"""Seconds beyond its grace that a supervisor may take to end a job before it is killed itself."""
SUPERVISOR_LOG = "supervisor.log"
SUPERVISE = "dtrain_dagster.clusters.supervise"
"""The module that is a supervisor's process; its command line is known by this name."""
TOKEN_LENGTH = 16 + 32
"""Digits of a launch's token: those of its run directory's digest, and random ones."""
START_SECONDS = 30.0
"""Seconds that a supervisor may take to record that it has the job."""
Revive = Callable[[int], None]
"""Start another supervisor for a job whose nodes outlive theirs, and hand it this descriptor, which holds the job's
lock."""


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
    preflight: str = ""
    """What an engine's node is checked for before its ranks start (`trainer.node.preflight.read_setting`); "" for
    ``quick``."""
    gpus: int = 0
    """GPUs that an engine is asked for with each node."""

    @property
    def cluster_key(self) -> str:
        """What tells the cluster apart among those of all kinds that share a home."""
        return cluster_key(self.engine, self.cluster_name)

    def has(self, launch: Mapping[str, Any]) -> bool:
        """Return whether this is the launch of a job of this cluster."""
        return all(launch.get(name, getattr(self, name)) == getattr(self, name) for name in ("engine", "cluster_name"))


def options_file(secret: Path) -> Path:
    """Return the file with the options of a job's engine, beside that of its launches' secret
    (``<home>/secrets/<job_id>``): a job can write into its run directory, so what its supervisor trusts, such as the
    path of a kubeconfig, is kept elsewhere, for this user alone."""
    return secret.with_name(f"{secret.name}.engine.json")


def read_options(secret: Path) -> dict[str, Any]:
    """Return the options of a job's engine. Raise `ClusterError` where there are none that can be read."""
    path = options_file(secret)
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(
            f"{path} with the options of the engine cannot be read: {error}; submit the job again"
        ) from None


class SupervisorError(ClusterError):
    """The supervisor of a job could not be started."""


def launch_document(spec: JobSpec, settings: LaunchSettings, folder: Path, rundir: RunDir) -> dict[str, Any]:
    """Return the next launch of this job as in ``launch.json``, but for where its code is."""
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return {
        "job_id": spec.job_id,
        "command": list(spec.command),
        "node_count": spec.node_count,
        "processes_per_node": spec.processes_per_node,
        "env": with_package({**path, **spec.env}),
        "master_port": spec.master_port,
        "elastic": spec.elastic,
        **({"keep_failed_seconds": spec.keep_failed_seconds} if spec.keep_failed_seconds else {}),
        "launch": 1 + max((node.launch for node in rundir.nodes()), default=0),
        "token": new_token(folder),
        "submitted_at": time.time(),
        **asdict(settings),
    }


def start_supervisor(launch: Mapping[str, Any], rundir: RunDir, lock: int, secret: Path, resumes: bool = False) -> None:
    """Start a supervisor in a session of its own, hand it the lock, and wait until it records that it has the job.

    ``lock``: the descriptor that holds the job's lock. ``secret``: the file for the secret of the launch. ``resumes``:
    go on with the nodes of one that died. Raise `SupervisorError` if it ends at once or does not answer in
    time; no process of it is left then.
    """
    folder = rundir.storage.local_path()
    rundir.write_json(LAUNCH, launch)
    before = (rundir.read_json(STATUS) or {}).get("pid")
    log_path = folder / LOGS / SUPERVISOR_LOG
    log_path.parent.mkdir(exist_ok=True)
    with open(log_path, "ab") as log:
        # -P: no module of the working directory may shadow one of the standard library.
        command = [sys.executable, "-P", "-m", SUPERVISE]
        process = subprocess.Popen(
            [*command, str(folder), str(lock), str(secret), *(["--resume"] if resumes else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock],
            env=with_package({**os.environ, MARK: supervisor_mark(launch)}),
        )
    # Waited for in the background, so that its end leaves no zombie in a submitter that lives long.
    threading.Thread(target=process.wait, daemon=True).start()
    deadline = time.monotonic() + START_SECONDS
    while (rundir.read_json(STATUS) or {}).get("pid") == before:
        if process.returncode is not None and (rundir.read_json(STATUS) or {}).get("pid") == before:
            sweep(launch, folder)
            raise SupervisorError(
                f"the supervisor of job {launch['job_id']!r} ended at once (exit code {process.returncode}); the end "
                f"of {log_path}:\n{last_lines(log_path, 12)}"
            )
        if time.monotonic() > deadline:
            sweep(launch, folder)
            raise SupervisorError(
                f"the supervisor of job {launch['job_id']!r} did not start in {START_SECONDS:.0f} s; see {log_path}"
            )
        time.sleep(POLL_SECONDS)


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which Python finds this project even where it was not installed."""
    root = Path(__file__).parents[3]
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not {"site-packages", "dist-packages"} & set(root.parts):
        paths.append(str(root))
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))} if paths else dict(environment)


def outlives_supervisor(launch: Mapping[str, Any]) -> bool:
    """Return whether the nodes of this launch go on when their supervisor dies: an engine runs them."""
    return launch.get("engine", "local") != "local"


def supervisor_mark(launch: Mapping[str, Any]) -> str:
    """Return the mark of the processes that end with the supervisor of a launch (`trainer.node.processes.MARK`). Nodes
    that outlive it have another, should an engine run them on this machine."""
    return f"supervisor-{launch['token']}" if outlives_supervisor(launch) else str(launch["token"])


def is_final(status: Mapping[str, Any] | None) -> bool:
    """Return whether a job's ``status.json`` says that it has ended; False where there is none."""
    return status is not None and JobState(status["state"]).is_final


def acquire_job_lock(folder: Path, rundir: RunDir) -> int | None:
    """Return the descriptor of the job's lock; None if the job runs already. A supervisor that has recorded its end is
    waited for."""
    while (lock := acquire(folder)) is None:
        if not is_final(rundir.read_json(STATUS)):
            return None
        time.sleep(POLL_SECONDS)
    return lock


def settle_status(rundir: RunDir) -> dict[str, Any] | None:
    """Return ``status.json``, for the holder of the job's lock. If the last supervisor died, write the end that it
    could not, end what it left, and tell people."""
    status = rundir.read_json(STATUS)
    if is_final(status):
        return status
    sweep(rundir.read_json(LAUNCH) or {}, rundir.storage.local_path())
    if status is None:  # it died before it recorded that it had the job, or there was none
        return None
    left = presences.find_latest_presences(rundir.nodes())
    ended_at = max(map(presences.end_of, left), default=status["started_at"])
    said = last_lines(rundir.storage.local_path(f"{LOGS}/{SUPERVISOR_LOG}"), 12)
    message = "the supervisor died, and its processes were ended with it" + (f"; it said:\n{said}" if said else "")
    status |= {"state": JobState.FAILED, "message": message, "ended_at": ended_at, "exit_code": 1}
    try:
        presences.close(rundir)
        rundir.write_json(STATUS, status)
    except OSError as error:  # likely what the supervisor died of
        status["message"] += f"\n{rundir.uri} cannot be written ({error.strerror or error}): make room there"
    else:
        tell(rundir)
    return status


def observe(rundir: RunDir, revive: Revive | None = None) -> tuple[dict[str, Any] | None, bool]:
    """Return ``status.json`` and whether a supervisor lives, both of one moment. Where the supervisor died, the job is
    settled, or, if its nodes go on, given another one (``revive``)."""
    folder = rundir.storage.local_path()
    while True:
        status = rundir.read_json(STATUS)
        if is_final(status):
            return status, False
        running = is_held(folder)
        if rundir.read_json(STATUS) != status:
            continue  # it moved on between the looks
        if running or status is None:
            return status, running
        lock = acquire(folder)  # nobody may start it while its end is being written
        if lock is not None:
            try:
                if revive is None or not outlives_supervisor(rundir.read_json(LAUNCH) or {}):
                    return settle_status(rundir), False
                revive(lock)
            finally:
                os.close(lock)


def end_supervised(rundir: RunDir, patience_seconds: float, revive: Revive | None = None) -> bool:
    """Request the end of a job from its supervisor and wait at most that long; return whether it has ended. A
    supervisor that takes much longer than its grace is killed, and the end that it could not write is written here."""
    folder = rundir.storage.local_path()
    grace = (rundir.read_json(STATUS) or {}).get("stop_grace_seconds", STOP_GRACE[1])
    asked_at = time.monotonic()
    while is_held(folder):
        waited = time.monotonic() - asked_at
        late = waited > grace + FORCE_SECONDS
        signal_supervisor(rundir, signal.SIGKILL if late else signal.SIGTERM)
        if waited > patience_seconds:
            return False
        time.sleep(POLL_SECONDS)
    status, runs = observe(rundir, revive)  # settles it, had the supervisor to be killed
    if runs and status is not None:  # its nodes went on without one: the new one is asked
        return end_supervised(rundir, patience_seconds - (time.monotonic() - asked_at), revive)
    return True


def new_token(folder: Path) -> str:
    """Return a mark for all processes of the next launch in this run directory. It begins with the directory's digest,
    so that ``launch.json``, which the job can write, cannot name processes of another job."""
    return f"{_digest(folder)}{uuid.uuid4().hex}"


def sweep(launch: Mapping[str, Any], folder: Path) -> None:
    """Kill the processes that a launch in this run directory has left on this machine; none, if its token is of another
    directory."""
    token = launch.get("token")
    if isinstance(token, str) and len(token) == TOKEN_LENGTH and token.startswith(_digest(folder)):
        kill_all(lambda: marked(supervisor_mark(launch)), SWEEP_SECONDS)


def signal_supervisor(rundir: RunDir, number: signal.Signals) -> None:
    """Send a signal to the supervisor that has recorded that it has the job. The process number in ``status.json`` is
    only a hint: the job can write that file, and process numbers are used again."""
    status = rundir.read_json(STATUS)
    if status is None or is_final(status):
        return
    folder = rundir.storage.local_path()
    pid = supervisor_of(folder, status.get("pid"))
    if pid is not None:
        signal_if(pid, number, lambda pid: is_supervisor(pid, folder))


def is_supervisor(pid: int, folder: Path) -> bool:
    """Return whether this process is a supervisor of this run directory. Its command line says so, and
    it has the lock open, which none of its children inherits."""
    command = command_of(pid)
    return (
        SUPERVISE in command
        and any(_is_same(argument, folder) for argument in command)
        and has_open(pid, folder / LOCK)
    )


def supervisor_of(folder: Path, said: object) -> int | None:
    """Return the process that supervises this run directory; None if there is none, or if it has only just been
    started. ``said``: the process number of the job's status, believed where it is a supervisor."""
    if isinstance(said, int) and is_supervisor(said, folder):
        return said
    found = {pid for pid in psutil.pids() if is_supervisor(pid, folder)}
    return next((pid for pid in found if parent_of(pid) not in found), None)  # else it is just becoming a node


def _digest(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[: TOKEN_LENGTH - 32]


def _is_same(argument: str, folder: Path) -> bool:
    return argument.startswith("/") and Path(argument).resolve() == folder.resolve()

"""The start of a supervised job: its launch is described, its supervisor started.

All that follows, up to the end of the job, belongs in `supervisor`; `settle` decides whether it may start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import ClusterError, JobSpec
from dtrain_dagster.clusters.supervision.settle import (
    POLL_SECONDS,
    SUPERVISE,
    SUPERVISOR_LOG,
    new_token,
    supervisor_mark,
    sweep,
)
from dtrain_dagster.settings.cluster_kinds import cluster_key
from trainer.node.line_log import last_lines
from trainer.node.processes import MARK
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir

START_SECONDS = 30.0
"""Seconds that a supervisor may take to record that it has the job."""


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


def launch_document(spec: JobSpec, folder: Path, rundir: RunDir) -> dict[str, Any]:
    """Return the next launch of this job as in ``launch.json``, without what the cluster's settings add."""
    return {
        "job_id": spec.job_id,
        "command": list(spec.command),
        "node_count": spec.node_count,
        "processes_per_node": spec.processes_per_node,
        "env": with_package({**_python_path(os.environ), **spec.env}),
        "master_port": spec.master_port,
        "elastic": spec.elastic,
        **({"keep_failed_seconds": spec.keep_failed_seconds} if spec.keep_failed_seconds else {}),
        "launch": 1 + max((node.launch for node in rundir.nodes()), default=0),
        "token": new_token(folder),
        "submitted_at": time.time(),
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


def _python_path(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in ("PYTHONPATH",) if name in environment}

"""The start of a job of the local cluster: its size is checked, its launch described, its supervisor started.

All that follows, up to the end of the job, belongs in `supervisor`; `settle` decides whether it may start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters.base import ClusterError, JobSpec
from dtrain_dagster.clusters.local.line_log import last_lines
from dtrain_dagster.clusters.local.processes import MARK
from dtrain_dagster.clusters.local.settle import POLL_SECONDS, SUPERVISOR_LOG, new_token, sweep
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir

RANKS_PER_CORE = 8
START_SECONDS = 30.0
"""Seconds that a supervisor may take to record that it has the job."""


def most_ranks() -> int:
    """Return the largest number of processes that this machine is asked to carry."""
    return RANKS_PER_CORE * (os.cpu_count() or 1)


def check_size(node_count: int, processes_per_node: int) -> None:
    """Raise `ClusterError` for a cluster size that this machine cannot have."""
    if node_count < 1:
        raise ClusterError(f"DTRAIN_NODES={node_count}: a cluster needs at least one node; set 1 or more")
    if processes_per_node < 1:
        raise ClusterError(f"DTRAIN_PROCESSES_PER_NODE={processes_per_node}: a node runs at least one; set 1 or more")
    ranks = node_count * processes_per_node
    if ranks > most_ranks():
        raise ClusterError(
            f"DTRAIN_NODES={node_count} x DTRAIN_PROCESSES_PER_NODE={processes_per_node} is {ranks} processes on "
            f"{os.cpu_count()} cores; the local cluster takes at most {RANKS_PER_CORE} per core, {most_ranks()} here: "
            "set fewer"
        )


def describe_launch(spec: JobSpec, folder: Path, rundir: RunDir) -> dict[str, Any]:
    """Return the next launch of this job as in ``launch.json``, without what the cluster's settings add."""
    return {
        "job_id": spec.job_id,
        "command": list(spec.command),
        "node_count": spec.node_count,
        "processes_per_node": spec.processes_per_node,
        "env": with_package({**_python_path(os.environ), **spec.env}),
        "master_port": spec.master_port,
        "elastic": spec.elastic,
        "launch": 1 + max((node.launch for node in rundir.nodes()), default=0),
        "token": new_token(folder),
        "submitted_at": time.time(),
    }


def start_supervisor(launch: Mapping[str, Any], rundir: RunDir, lock: int, secret: Path) -> None:
    """Start a supervisor in a session of its own, hand it the lock, and wait until it records that it has the job.

    ``lock``: the descriptor that holds the job's lock. ``secret``: the file for the secret of the launch. Raise
    `ClusterError` if the supervisor ends at once or does not answer in time; no process of it is left then.
    """
    folder = rundir.storage.local_path()
    rundir.write_json(LAUNCH, launch)
    log_path = folder / LOGS / SUPERVISOR_LOG
    log_path.parent.mkdir(exist_ok=True)
    with open(log_path, "ab") as log:
        # -P: no module of the working directory may shadow one of the standard library.
        command = [sys.executable, "-P", "-m", "dtrain_dagster.clusters.local.supervisor"]
        process = subprocess.Popen(
            [*command, str(folder), str(lock), str(secret)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock],
            env=with_package({**os.environ, MARK: launch["token"]}),
        )
    # Waited for in the background, so that its end leaves no zombie in a submitter that lives long.
    threading.Thread(target=process.wait, daemon=True).start()
    deadline = time.monotonic() + START_SECONDS
    while rundir.read_json(STATUS) is None:
        if process.returncode is not None and rundir.read_json(STATUS) is None:
            raise ClusterError(
                f"the supervisor of job {launch['job_id']!r} ended at once (exit code {process.returncode}); the end "
                f"of {log_path}:\n{last_lines(log_path, 12)}"
            )
        if time.monotonic() > deadline:
            sweep(launch, folder)
            raise ClusterError(
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

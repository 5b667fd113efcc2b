"""A run directory's lock in the hands of who starts, settles or ends its job on this machine, without a supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.linelog import last_lines
from dtrain_dagster.clusters.lock import acquire
from dtrain_dagster.clusters.processes import kill_all, marked
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir

SWEEP_SECONDS = 10.0
"""How long processes may take to die whose supervisor and reaper were both killed."""
POLL_SECONDS = 0.02
SUPERVISOR_LOG = "supervisor.log"


def claim(folder: Path, rundir: RunDir) -> int | None:
    """The job's lock; None if it runs already. A supervisor that has said how it ended is waited for."""
    while (lock := acquire(folder)) is None:
        status = rundir.read_json(STATUS)
        if status is None or not JobState(status["state"]).is_final:
            return None
        time.sleep(POLL_SECONDS)
    return lock


def settle(rundir: RunDir) -> dict[str, Any] | None:
    """With the job's lock in hand: if the last supervisor died, write the end that it could not. ``status.json``."""
    status = rundir.read_json(STATUS)
    if status is None or JobState(status["state"]).is_final:
        return status
    sweep(rundir.read_json(LAUNCH) or {})  # its reaper may have died with it
    left = presences.latest(rundir.nodes())
    ended_at = max(map(presences.end_of, left), default=status["started_at"])
    said = last_lines(rundir.storage.local_path(f"{LOGS}/{SUPERVISOR_LOG}"), 12)
    message = "the supervisor died, and its processes were ended with it" + (f"; it said:\n{said}" if said else "")
    status |= {"state": JobState.FAILED, "message": message, "ended_at": ended_at, "exit_code": 1}
    try:
        presences.close(rundir)
        rundir.write_json(STATUS, status)
    except OSError as error:  # likely what the supervisor died of
        status["message"] += f"\n{rundir.uri} cannot be written ({error.strerror or error}): make room there"
    return status


def sweep(launch: Mapping[str, Any]) -> None:
    """Kill what a launch has left on this machine."""
    if token := launch.get("token"):
        kill_all(lambda: marked(token), SWEEP_SECONDS)


def signal_supervisor(rundir: RunDir, number: signal.Signals) -> None:
    """Send a signal to the supervisor that has said that it has the job."""
    status = rundir.read_json(STATUS)
    if status and not JobState(status["state"]).is_final:
        with contextlib.suppress(ProcessLookupError):
            os.kill(status["pid"], number)

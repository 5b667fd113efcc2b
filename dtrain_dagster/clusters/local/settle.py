"""A run directory's lock in the hands of who starts, settles or ends its job on this machine, without a supervisor."""

from __future__ import annotations

import hashlib
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain_dagster.clusters import presence as presences
from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.clusters.local.line_log import last_lines
from dtrain_dagster.clusters.local.processes import (
    command_of,
    has_open,
    kill_all,
    marked,
    parent_of,
    process_ids,
    signal_if,
)
from dtrain_dagster.support.job_lock import LOCK, acquire
from trainer.rundir import LAUNCH, LOGS, STATUS, RunDir

SWEEP_SECONDS = 10.0
"""How long processes may take to die whose supervisor and reaper were both killed."""
POLL_SECONDS = 0.02
SUPERVISOR_LOG = "supervisor.log"
TOKEN_LENGTH = 16 + 32
"""Digits of a launch's token: of its run directory's digest, and random ones."""


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
    sweep(rundir.read_json(LAUNCH) or {}, rundir.storage.local_path())  # its reaper may have died with it
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


def new_token(folder: Path) -> str:
    """A mark for whatever the next launch in this run directory starts. It begins with the directory's digest, so that
    ``launch.json``, which the job can write, cannot name processes of another job."""
    return f"{_digest(folder)}{uuid.uuid4().hex}"


def sweep(launch: Mapping[str, Any], folder: Path) -> None:
    """Kill what a launch in this run directory has left on this machine; nothing, if its token is not of there."""
    token = launch.get("token")
    if isinstance(token, str) and len(token) == TOKEN_LENGTH and token.startswith(_digest(folder)):
        kill_all(lambda: marked(token), SWEEP_SECONDS)


def signal_supervisor(rundir: RunDir, number: signal.Signals) -> None:
    """Send a signal to the supervisor that has said that it has the job. What ``status.json`` calls its process is no
    more than a hint: the job can write that file, and numbers of processes are used again."""
    status = rundir.read_json(STATUS)
    if not status or JobState(status["state"]).is_final:
        return
    folder = rundir.storage.local_path()
    pid = supervisor_of(folder, status.get("pid"))
    if pid is not None:
        signal_if(pid, number, lambda pid: is_supervisor(pid, folder))


def is_supervisor(pid: int, folder: Path) -> bool:
    """Is this process a supervisor of this run directory, or its reaper? Its command says so, and it has the lock
    open, which nothing inherits that it starts."""
    command = command_of(pid)
    return (
        "dtrain_dagster.clusters.local.supervisor" in command
        and any(_is_same(argument, folder) for argument in command)
        and has_open(pid, folder / LOCK)
    )


def supervisor_of(folder: Path, said: object) -> int | None:
    """The process that supervises this run directory; None if there is none, or it has only just been started.
    ``said``: what the job's status calls it, believed where it is one."""
    if isinstance(said, int) and is_supervisor(said, folder):
        return said
    found = {pid for pid in process_ids() if is_supervisor(pid, folder)}
    return next((pid for pid in sorted(found) if parent_of(pid) in found), None)  # above it is its reaper


def _digest(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[: TOKEN_LENGTH - 32]


def _is_same(argument: str, folder: Path) -> bool:
    return argument.startswith("/") and Path(argument).resolve() == folder.resolve()

"""The life of a job as its command follows it: its name, its owner, its cancellation by Ctrl-C, its beginning and end.

What a command trains, and its options, do not belong here.
"""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from dtrain_dagster.cli.common import EXIT_INTERRUPTED, EXIT_STOPPED, Refusal, say
from dtrain_dagster.cli.job_names import LATEST

if TYPE_CHECKING:
    from dtrain_dagster.clusters.base import ClusterConfig, GPUClusterManager, JobStatus
    from dtrain_dagster.settings.environment import Settings
    from trainer.rundir import RunDir


def new_job_id(name: str | None, kind: str) -> str:
    """Return the given id, or one made from the time. Raise `Refusal` for an invalid one."""
    from trainer.config import JOB_ID

    if name is None:
        return f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    if not JOB_ID.fullmatch(name):
        raise Refusal(
            f"--name {name!r}: letters, digits, dots, dashes and underscores, a letter or digit first, at most 200"
        )
    if name == LATEST:
        raise Refusal(f"--name {LATEST}: this word stands for the job that was started last; choose another")
    return name


def runs_already(manager: GPUClusterManager, job_id: str) -> bool:
    """Return whether the job runs. Raise `Refusal` for a job that has succeeded."""
    from dtrain_dagster.clusters.base import ClusterError, JobState

    try:
        state = manager.job_status(job_id).state
    except ClusterError:
        return False  # there is no such job
    if state is JobState.SUCCEEDED:
        raise Refusal(
            f"job {job_id} has succeeded already: choose another --name, with --set training.start_from={job_id} to "
            f"start from its weights; `dtrain logs {job_id}` shows what it did"
        )
    return not state.is_final


def take_over(rundir: RunDir) -> None:
    """Make a person the owner of a job of a Dagster run, so that it does not count as an orphan when that run has
    ended."""
    from dtrain_dagster.clusters.base import OWNER

    if rundir.read_json(OWNER) is not None:
        rundir.write_json(OWNER, {"dagster_run_id": None, "since": time.time()})


class _Terminated(BaseException):
    """The process received SIGTERM."""


@contextmanager
def ended_by_signals(before_end: Callable[[], object]) -> Iterator[None]:
    """End the command on Ctrl-C or SIGTERM within the block, after a call of ``before_end``."""

    def terminate(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (KeyboardInterrupt, _Terminated) as error:
        before_end()
        sys.exit(EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_STOPPED)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def cancelled_by_signals(
    manager: GPUClusterManager, job_id: str, unless: bool, then: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Cancel the job and end the command on Ctrl-C or SIGTERM within the block, ``unless`` the job is to be left
    running. ``then`` is called before the command ends, to say how to go on."""

    def cancel() -> None:
        from dtrain_dagster.clusters.base import ClusterError

        say(f"cancelling job {job_id}; Ctrl-C again does not wait for it", err=True)
        try:
            manager.cancel_job(job_id)
        except ClusterError as why:  # it was not submitted yet, or may go on to cost money
            say(f"job {job_id} was not cancelled: {why}", err=True)
        except KeyboardInterrupt:
            say(f"job {job_id} may still be ending: `dtrain status {job_id}` tells, `dtrain cancel {job_id}`", err=True)
        then()

    with nullcontext() if unless else ended_by_signals(cancel):
        yield


def say_what_was_got(got: ClusterConfig, wanted: str) -> None:
    """Print the kind of nodes if it differs from the wanted one."""
    if got.gpu_type != wanted:
        tier = f" ({got.tier})" if got.tier else ""
        say(f"{wanted} was not available: using {got.gpu_type}{tier}", err=True)


def announce(rundir: RunDir) -> None:
    """Print what was started, and where it can be seen."""
    from trainer.rundir import LAUNCH

    launched = rundir.read_json(LAUNCH) or {}
    nodes, processes = launched["node_count"], launched["processes_per_node"]
    each = "" if processes == 1 else f", {processes} processes on each"
    say(f"job {launched['job_id']}: {nodes} node{'s' if nodes > 1 else ''}{each}", err=True)
    if studio := launched.get("studio_url"):
        say(studio, err=True)


def describe_outcome(status: JobStatus) -> str:
    """Return how a job has ended, and why where more than its state is known. Pure."""
    why = f": {status.message}" if status.message not in ("", status.state.value) else ""
    return f"job {status.job_id} {status.state}{why}"


def end(settings: Settings, rundir: RunDir, status: JobStatus, go_on: str = "") -> None:
    """Print how the job ended, and exit as it did. ``go_on``: the command that goes on with it where it failed."""
    from dtrain_dagster.cli.going_on import say_how_to_go_on
    from trainer.rundir import STATUS

    if status.state == "succeeded":
        return
    say(describe_outcome(status), err=True)
    say_how_to_go_on(settings, status.job_id, go_on)
    final = rundir.read_json(STATUS) or {}
    sys.exit(final.get("exit_code") or 1)  # none was written where the disk is full

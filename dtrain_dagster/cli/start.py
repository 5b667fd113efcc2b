"""Start and follow: what every command that starts a job does, whatever the job is. Its name, its owner, Ctrl-C, its
end, and what a person is told when the command ends before the job is done.

What a command trains does not belong here. `dtrain_dagster.cli.follow` shows how a job goes.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import click

from dtrain_dagster.cli.common import EXIT_INTERRUPTED, EXIT_STOPPED, Refusal, gathers, run_dir, say
from dtrain_dagster.cli.facts import say_how_it_stands
from dtrain_dagster.cli.job_names import LATEST, complete_jobs
from dtrain_dagster.clusters.base import OWNER, ClusterConfig, ClusterError, GPUClusterManager, JobState, JobStatus
from dtrain_dagster.jobs.start import BUDGET, ran_out
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import format_duration, seconds_of
from trainer.config import JOB_ID
from trainer.rundir import LAUNCH, STATUS, RunDir

MOST_KEPT_SECONDS = 86400.0
"""The longest time for which failed nodes are kept: one that is forgotten is paid for."""


def _read_duration(context: click.Context, option: click.Parameter, value: str | None) -> float:
    try:
        seconds = 0.0 if value is None else seconds_of(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    if seconds > MOST_KEPT_SECONDS:
        raise click.BadParameter(
            f"{value!r} is more than {format_duration(MOST_KEPT_SECONDS)}: give less", context, option
        )
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """How a job is started, as options say it."""

    name: str | None = None
    detach: bool = False
    keep_failed_seconds: float = 0.0
    """For how long nodes that fail are left in place for a person."""
    is_dry: bool = False

    def check(self, settings: Settings) -> None:
        """Raise `Refusal` where nodes of this kind of cluster cannot be kept; say so where there is nothing to keep."""
        if not self.keep_failed_seconds:
            return
        if settings.kind.buys_nodes:
            raise Refusal(
                f"--keep-failed: the {settings.kind.words} takes its nodes back as soon as their processes have ended. "
                "Enter a job that runs from its page in the studio, or train on slurm, kubernetes or ray"
            )
        if settings.kind.is_this_machine:
            say(f"--keep-failed: the nodes are this machine, so none is kept: look into {settings.jobs_uri}", err=True)


start_options = gathers(
    How,
    "how",
    click.option(
        "--name",
        metavar="JOB",
        shell_complete=complete_jobs,
        help="Name of the job; `dtrain train` continues an existing one.  [default: made from the time]",
    ),
    click.option("--detach", is_flag=True, help="Print the name of the job and leave it running."),
    click.option(
        "--keep-failed",
        "keep_failed_seconds",
        callback=_read_duration,
        metavar="30m",
        help="Keep nodes whose processes fail for that long, to look into; they are paid for.",
    ),
    click.option(
        "--dry-run",
        "is_dry",
        is_flag=True,
        help="Print what would be submitted, its price and what is in its way; submit nothing.",
    ),
)
"""The options of `How`, which a command gets as ``how``."""


def start_and_follow(
    settings: Settings,
    manager: GPUClusterManager,
    job_id: str,
    begin: Callable[[], object],
    follow: Callable[[], JobStatus],
    go_on: str,
    detach: str = "",
) -> JobStatus | None:
    """Begin a job, say what was started, follow it, and return how it has ended. Ctrl-C and SIGTERM cancel it, tell how
    it stands and how to ``go_on``, and end this command. ``detach``: the command that follows a job which is left
    running; then its name is printed, and None returned."""

    def cancel() -> None:
        say(f"cancelling job {job_id}; Ctrl-C again does not wait for it", err=True)
        try:
            manager.cancel_job(job_id)
        except ClusterError as why:  # it was not submitted yet, or may go on to cost money
            say(f"job {job_id} was not cancelled: {why}", err=True)
        except KeyboardInterrupt:
            say(f"job {job_id} may still be ending: `dtrain status {job_id}` tells, `dtrain cancel {job_id}`", err=True)
        say_how_it_stands(settings, job_id)
        say(go_on, err=True)

    with nullcontext() if detach else ended_by_signals(cancel):
        begin()
        if detach:
            say(job_id)
            say(f"follow it: {detach}", err=True)
            return None
        launched = run_dir(settings, job_id).read_json(LAUNCH) or {}
        nodes, processes = launched["node_count"], launched["processes_per_node"]
        each = "" if processes == 1 else f", {processes} processes on each"
        say(f"job {job_id}: {nodes} node{'s' if nodes > 1 else ''}{each}", err=True)
        if studio := launched.get("studio_url"):
            say(studio, err=True)
        return follow()


def finish(settings: Settings, rundir: RunDir, status: JobStatus, go_on: str = "") -> None:
    """Print how the job ended, and exit as it did. ``go_on``: how to go on with it where it failed; one that has ended
    at its budget needs a larger one."""
    if status.state == "succeeded":
        return
    say(describe_outcome(status), err=True)
    say_how_it_stands(settings, status.job_id)
    if go_on:
        say(go_on + (f" --set training.{BUDGET}=MORE" if ran_out(rundir) else ""), err=True)
    final = rundir.read_json(STATUS) or {}
    sys.exit(final.get("exit_code") or 1)  # none was written where the disk is full


def new_job_id(name: str | None, kind: str) -> str:
    """Return the given id, or one made from the time. Raise `Refusal` for an invalid one."""
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


def provision(manager: GPUClusterManager, nodes: int, sku: str) -> ClusterConfig:
    """Return the nodes that the cluster has for a job, and print their kind if it is not the wanted one."""
    got = manager.provision_cluster(nodes, sku)
    if got.gpu_type != sku:
        tier = f" ({got.tier})" if got.tier else ""
        say(f"{sku} was not available: using {got.gpu_type}{tier}", err=True)
    return got


def describe_outcome(status: JobStatus) -> str:
    """Return how a job has ended, and why where more than its state is known. Pure."""
    why = f": {status.message}" if status.message not in ("", status.state.value) else ""
    return f"job {status.job_id} {status.state}{why}"


def this_command(name: str = "") -> str:
    """Return the command that runs, to be typed again; ``name``: of what it then continues, where none was given."""
    command, *words = click.get_current_context().obj or [""]
    return shlex.join(["dtrain", command, *(["--name", name] if name else []), *words])


def say_that_it_runs_on(settings: Settings, job_id: str) -> None:
    """Print how a job stands which is no longer followed, that it goes on, and the commands for it."""
    if not say_how_it_stands(settings, job_id):
        say(f"the job goes on; follow it: dtrain status {job_id} --follow", f"end it: dtrain cancel {job_id}", err=True)


def say_that_jobs_go_on(jobs: str, name: str, again: str) -> None:
    """Print what becomes of the ``jobs`` of a fleet or a search whose command was ended."""
    say(
        f"the running {jobs} continue, each up to the dollars that it was promised: `dtrain status {name}` shows them, "
        f"`dtrain cancel {name}` ends them",
        f"go on: {again}",
        err=True,
    )


def say_after_work(settings: Settings, jobs: Sequence[str], go_on: str) -> None:
    """Print how the ``jobs`` stand that an interrupted command had begun, and the command that goes on."""
    for job_id in jobs:
        say_how_it_stands(settings, job_id)
    if not jobs:
        say("no job was started", err=True)
    say("what was materialized is kept; only what is missing or has changed is made again", f"go on: {go_on}", err=True)

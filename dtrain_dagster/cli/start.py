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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import click

from dtrain_dagster.cli.common import EXIT_INTERRUPTED, EXIT_STOPPED, TROUBLE, Refusal, manager_of, run_dir, say
from dtrain_dagster.cli.facts import JobCourse, facts_of, price_of_cluster, read_course, so_far
from dtrain_dagster.cli.job_names import LATEST, complete_jobs
from dtrain_dagster.clusters.base import OWNER, ClusterConfig, ClusterError, GPUClusterManager, JobState, JobStatus
from dtrain_dagster.jobs.facts import JobFacts
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.formatting import format_duration, seconds_of
from trainer.config import JOB_ID, JobConfig
from trainer.rundir import LAUNCH, STATUS, RunDir

MOST_KEPT_SECONDS = 86400.0
"""The longest time for which failed nodes are kept: one that is forgotten is paid for."""


class _Duration(click.ParamType):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            seconds = seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds > MOST_KEPT_SECONDS:
            self.fail(f"{value!r} is more than {format_duration(MOST_KEPT_SECONDS)}: give less", param, ctx)
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


def start_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of `How`, which it gets as ``how``."""

    @wraps(command)
    def run(**options: Any) -> None:
        command(how=How(**{field.name: options.pop(field.name) for field in fields(How)}), **options)

    keep = "Keep nodes whose processes fail for that long, to look into; they are paid for."
    dry = "Print what would be submitted, its price and what is in its way; submit nothing."
    name = "Name of the job; `dtrain train` continues an existing one.  [default: made from the time]"
    for option in (
        click.option("--dry-run", "is_dry", is_flag=True, help=dry),
        click.option("--keep-failed", "keep_failed_seconds", type=_Duration(), default=0.0, metavar="30m", help=keep),
        click.option("--detach", is_flag=True, help="Print the name of the job and leave it running."),
        click.option("--name", metavar="JOB", shell_complete=complete_jobs, help=name),
    ):
        run = option(run)
    return run


def start_and_follow(
    settings: Settings,
    manager: GPUClusterManager,
    job_id: str,
    begin: Callable[[], object],
    follow: Callable[[], JobStatus],
    again: str,
    doing: str = "go on",
    detach: str = "",
) -> JobStatus | None:
    """Begin a job, say what was started, follow it, and return how it has ended. Ctrl-C and SIGTERM cancel it, tell how
    it stands with the command to do it ``again``, and end this command. ``detach``: the command that follows a job
    which is left running; then its name is printed, and None returned."""

    def cancel() -> None:
        say(f"cancelling job {job_id}; Ctrl-C again does not wait for it", err=True)
        try:
            manager.cancel_job(job_id)
        except ClusterError as why:  # it was not submitted yet, or may go on to cost money
            say(f"job {job_id} was not cancelled: {why}", err=True)
        except KeyboardInterrupt:
            say(f"job {job_id} may still be ending: `dtrain status {job_id}` tells, `dtrain cancel {job_id}`", err=True)
        say_how_to_go_on(settings, job_id, again, doing)

    with nullcontext() if detach else ended_by_signals(cancel):
        begin()
        if detach:
            say(job_id)
            say(f"follow it: {detach}", err=True)
            return None
        announce(run_dir(settings, job_id))
        return follow()


def finish(settings: Settings, rundir: RunDir, status: JobStatus, go_on: str = "") -> None:
    """Print how the job ended, and exit as it did. ``go_on``: the command that goes on with it where it failed."""
    if status.state == "succeeded":
        return
    say(describe_outcome(status), err=True)
    say_how_to_go_on(settings, status.job_id, go_on)
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


def say_what_was_got(got: ClusterConfig, wanted: str) -> None:
    """Print the kind of nodes if it differs from the wanted one."""
    if got.gpu_type != wanted:
        tier = f" ({got.tier})" if got.tier else ""
        say(f"{wanted} was not available: using {got.gpu_type}{tier}", err=True)


def announce(rundir: RunDir) -> None:
    """Print what was started, and where it can be seen."""
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


def this_command_again(job_id: str = "", dataset: str = "") -> str:
    """Return `command_again` for the words after ``dtrain`` of the command that runs; "" outside of one."""
    context = click.get_current_context(silent=True)
    return command_again([] if context is None else context.obj or (), job_id, dataset)


def command_again(arguments: Sequence[str], job_id: str = "", dataset: str = "") -> str:
    """Return the command of these words that does the same again. ``job_id``: the name to give where none was given;
    ``dataset``: what ``latest`` meant, since another dataset may be the latest by then. Pure."""
    if not arguments:
        return ""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    for number, word in enumerate(words[:end]):
        if dataset and word == "latest" and number and words[number - 1] == "--dataset":
            words[number] = dataset
        elif dataset and word == "--dataset=latest":
            words[number] = f"--dataset={dataset}"
    if job_id and not any(word == "--name" or word.startswith("--name=") for word in words[:end]):
        words[1:1] = ["--name", job_id]
    return shlex.join(["dtrain", *words])


def dataset_name(job: JobConfig) -> str:
    """Return the name of the dataset's folder, by which ``--dataset`` finds it; "" for one that is made. Pure."""
    return "" if job.dataset.factory is not None else job.dataset.uri.rstrip("/").rpartition("/")[2]


def say_how_to_go_on(settings: Settings, job_id: str, go_on: str, what: str = "go on") -> None:
    """Print how a job has ended, and the command that goes on with it."""
    say_how_it_stands(settings, job_id)
    if go_on:
        say(f"{what}: {go_on}", err=True)


def say_that_it_runs_on(settings: Settings, job_id: str) -> None:
    """Print how a job stands which is no longer followed, that it goes on, and the commands for it."""
    if not say_how_it_stands(settings, job_id):
        say(f"the job goes on; follow it: dtrain status {job_id} --follow", err=True)
        say(f"end it: dtrain cancel {job_id}", err=True)


def say_how_it_stands(settings: Settings, job_id: str) -> bool:
    """Print how a job stands, and what it took and cost, where that can be read. Return whether it is known to have
    ended."""
    with suppress(*TROUBLE):
        rundir = run_dir(settings, job_id)
        facts = facts_of(settings, manager_of(settings).job_status(job_id))
        course = read_course(facts.status, rundir)
        say(*describe_end(facts, course, rundir.latest_checkpoint(), price_of_cluster(settings)), err=True)
        return facts.status.state.is_final
    return False


def describe_end(facts: JobFacts, course: JobCourse, checkpoint: tuple[str, int] | None, price_words: str) -> list[str]:
    """Return the state of a job, and what it took and cost, as lines. ``checkpoint``: the name and step of its latest.
    Pure."""
    progress = course.view
    of = f"/{progress.total_steps}" if progress.total_steps else ""
    step = max(progress.step, checkpoint[1] if checkpoint else 0)  # not each step is reported
    where = f" at step {step}{of}" if step else ""
    where += f" of epoch {progress.epoch}" if step and progress.epoch else ""
    saved = ""
    if facts.status.state.is_final and facts.status.state != "succeeded" and course.has_events:
        saved = f"; its checkpoint is of step {checkpoint[1]}" if checkpoint else "; it has no checkpoint yet"
    lines = [f"job {facts.status.job_id}: {facts.state}{where}{saved}"]
    if spent := so_far(facts):
        lines.append(f"so far: {spent}" + (f" ({price_words})" if facts.usd is not None else ""))
    return lines


def say_that_jobs_go_on(jobs: str, name: str, again: str) -> None:
    """Print what becomes of the ``jobs`` of a fleet or a search whose command was ended."""
    say(
        f"the running {jobs} continue, each up to the dollars that it was promised: `dtrain status {name}` shows them, "
        f"`dtrain cancel {name}` ends them",
        err=True,
    )
    say(f"go on: {again}", err=True)


def say_after_work(settings: Settings, jobs: Sequence[str], go_on: str) -> None:
    """Print how the ``jobs`` stand that an interrupted command had begun, and the command that goes on."""
    for job_id in jobs:
        say_how_it_stands(settings, job_id)
    if not jobs:
        say("no job was started", err=True)
    say("what was materialized is kept; only what is missing or has changed is made again", err=True)
    say(f"go on: {go_on}", err=True)

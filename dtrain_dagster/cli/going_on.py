"""What a person is told when a command ends before its job is done: the state of the job, what it took and cost so far,
and the exact command that goes on with it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dtrain_dagster.cli.common import cluster_of, run_dir, say

if TYPE_CHECKING:
    from dtrain_dagster.cli.job_facts import JobFacts
    from dtrain_dagster.cli.status import JobCourse
    from dtrain_dagster.settings.environment import Settings
    from trainer.config import JobConfig
    from trainer.rundir import RunDir

ARGUMENTS = "dtrain.arguments"
"""Key of a command's context under which its words are kept, as they were typed."""


def typed_arguments() -> list[str]:
    """Return the words after ``dtrain`` of the command that runs; none outside of one."""
    context = click.get_current_context(silent=True)
    return [] if context is None else list(context.meta.get(ARGUMENTS, ()))


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
    """Print how a job has ended, what it took and cost, and the command that goes on with it. Where one of these cannot
    be read, the others are told."""
    with suppress(ValueError, RuntimeError, OSError):
        rundir = run_dir(settings, job_id)
        facts, course = _look(settings, rundir, job_id)
        for line in describe_end(facts, course, rundir.latest_checkpoint(), _price_words(settings)):
            say(line, err=True)
    if go_on:
        say(f"{what}: {go_on}", err=True)


def say_that_it_runs_on(settings: Settings, job_id: str) -> None:
    """Print that a job which is no longer followed goes on, how it stands, and the commands for it."""
    with suppress(ValueError, RuntimeError, OSError):
        facts, course = _look(settings, run_dir(settings, job_id), job_id)
        for line in describe_end(facts, course, None, _price_words(settings)):
            say(line, err=True)
        if facts.status.state.is_final:
            return
    say(f"the job goes on; follow it: dtrain watch {job_id}", err=True)
    say(f"end it: dtrain cancel {job_id}", err=True)


def describe_end(facts: JobFacts, course: JobCourse, checkpoint: tuple[str, int] | None, price_words: str) -> list[str]:
    """Return the state of a job, and what it took and cost, as lines. ``checkpoint``: the name and step of its latest.
    Pure."""
    from dtrain_dagster.cli.status import so_far

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


def _look(settings: Settings, rundir: RunDir, job_id: str) -> tuple[JobFacts, JobCourse]:
    from dtrain_dagster.cli.job_facts import read_facts
    from dtrain_dagster.cli.status import read_course
    from dtrain_dagster.cli.time_left import LeftClock

    facts = read_facts(settings, cluster_of(settings)[0].manager().job_status(job_id))
    return facts, read_course(facts.status, rundir, LeftClock(rundir))


def _price_words(settings: Settings) -> str:
    from dtrain_dagster.costs.prices import price_words

    return price_words(cluster_of(settings)[0].sku, settings.kind.buys_nodes)


def say_after_work(settings: Settings, jobs: Sequence[str], go_on: str) -> None:
    """Print how the ``jobs`` ended that an interrupted command had begun or gone on with, and the command that goes
    on."""
    for job_id in jobs:
        say_how_to_go_on(settings, job_id, "")
    if not jobs:
        say("no job was started", err=True)
    say("what was materialized is kept; only what is missing or has changed is made again", err=True)
    say(f"go on: {go_on}", err=True)

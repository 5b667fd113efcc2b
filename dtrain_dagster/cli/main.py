"""`dtrain`: the cluster from a shell, whichever kind it is. Each command imports what it needs, so that ``--help``
answers at once. The commands that start something are in `dtrain_dagster.cli.train` and `dtrain_dagster.cli.launch`.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import click

from dtrain_dagster.cli import json_fields
from dtrain_dagster.cli.azure_doctor import azure
from dtrain_dagster.cli.common import (
    EXIT_INTERRUPTED,
    Refusal,
    cluster_of,
    console,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.completion import completion
from dtrain_dagster.cli.costs import cost
from dtrain_dagster.cli.data import data
from dtrain_dagster.cli.endpoint import endpoint
from dtrain_dagster.cli.fleet import fleet
from dtrain_dagster.cli.home import clean, setup, work
from dtrain_dagster.cli.init import init
from dtrain_dagster.cli.job_names import find_job, job_argument
from dtrain_dagster.cli.json_fields import also, listed
from dtrain_dagster.cli.json_output import json_option, print_json
from dtrain_dagster.cli.kubernetes import kubernetes
from dtrain_dagster.cli.launch import launch
from dtrain_dagster.cli.monitoring import dashboard, profile, report, watch
from dtrain_dagster.cli.prices import prices
from dtrain_dagster.cli.ray import ray
from dtrain_dagster.cli.search import search
from dtrain_dagster.cli.searches import searches
from dtrain_dagster.cli.sections import SHORT_HELP, SectionedGroup
from dtrain_dagster.cli.slurm import slurm
from dtrain_dagster.cli.train import train
from dtrain_dagster.cli.tune import tune
from dtrain_dagster.cli.web import mlflow, tensorboard, ui

READERS = 16
"""The number of run directories that are read in parallel."""


@click.group(
    cls=SectionedGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(package_name="dtrain", message="%(prog)s %(version)s", help="Print the version and exit.")
@click.pass_context
def main(context: click.Context) -> None:
    """Run distributed trainings on the cluster, follow them, and stop them.

    On the local cluster a node is a group of processes on this machine. With DTRAIN_CLUSTER=azure_ml nodes are Azure
    ML's. A job outlives the shell that started it; everything about it is in its run directory, in
    DTRAIN_HOME/storage/jobs or DTRAIN_STORAGE/jobs. Unless it is set, DTRAIN_HOME is the folder .dtrain of the working
    directory, or of the nearest folder above it that has one.

    JOB is the name of a job, the beginning of it that no other job shares, or `latest`, the job that was started last.
    """
    if context.invoked_subcommand is None:
        click.echo(SHORT_HELP, nl=False)


COMMANDS = (
    *(
        init,
        launch,
        train,
        tune,
        search,
        fleet,
        data,
        endpoint,
        dashboard,
        report,
        watch,
        profile,
        prices,
        cost,
        azure,
        kubernetes,
        slurm,
    ),
    *(ray, ui, mlflow, tensorboard, setup, clean, work, completion, searches),
)
for command in COMMANDS:
    main.add_command(command)


@main.command()
@json_option(listed(json_fields.JOB))
@refuses
def jobs(as_json: bool) -> None:
    """List the jobs of the cluster, newest first.

    Times and dollars cover all launches of a job. A probe, which an estimate rests on, is a job of its own.

    \b
    Examples:
      dtrain jobs
      dtrain jobs --json | jq -r '.[] | select(.state == "failed").job'
    """
    from dtrain_dagster.cli.job_facts import list_facts
    from dtrain_dagster.cli.job_tables import print_jobs

    settings = read_settings()
    rows = list_facts(settings, cluster_of(settings)[0].manager().list_jobs(), READERS)
    if as_json:
        print_json([row.document() for row in rows])
    elif rows:
        print_jobs(console(), rows)
    else:
        say(f"no jobs in {settings.jobs_uri} yet; `dtrain train --dataset latest` starts one")


@main.command()
@job_argument(required=False)
@json_option({**json_fields.STATUS, **also(json_fields.HEALTH, "without JOB")})
@refuses
def status(job_id: str | None, as_json: bool) -> None:
    """Show the state of a job, or of the cluster's nodes.

    Without JOB it shows the nodes. `dtrain watch` follows a job.

    \b
    Examples:
      dtrain status
      dtrain status latest
      dtrain status train-6f66 --json
    """
    from dtrain_dagster.cli.job_facts import read_facts
    from dtrain_dagster.cli.status import health_document, print_health, print_status, read_course, status_document
    from dtrain_dagster.cli.time_left import LeftClock, expect_finish

    settings = read_settings()
    manager = cluster_of(settings)[0].manager()
    if job_id is None:
        health = manager.monitor_health()
        if as_json:
            print_json(health_document(health))
        else:
            print_health(console(), health)
        return
    job_id = find_job(settings, job_id)
    rundir = run_dir(settings, job_id)
    facts = read_facts(settings, manager.job_status(job_id))
    if facts.status.damage and not as_json:
        raise Refusal(facts.status.damage)
    course = read_course(facts.status, rundir, LeftClock(rundir, lambda: expect_finish(settings, rundir)))
    if as_json:
        print_json(status_document(facts, rundir, course))
    else:
        print_status(console(), facts, rundir, time.time(), course)


@main.command()
@job_argument()
@click.option("--node", type=click.IntRange(min=0), metavar="K", help="Only this node, counted from 0.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the job has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each node.")
@json_option(json_fields.LOG_LINE, "Print one JSON document for each line instead.")
@refuses
def logs(job_id: str, node: int | None, follow: bool, tail: int | None, as_json: bool) -> None:
    """Print the output of a job's processes.

    Ctrl-C ends --follow, not the job.

    \b
    Examples:
      dtrain logs latest --tail 20
      dtrain logs latest --follow --node 1
      dtrain logs latest --json | jq -r 'select(.node == 1).text'
    """
    from dtrain_dagster.cli.going_on import say_that_it_runs_on
    from dtrain_dagster.cli.terminal import print_json_lines, print_lines, stream_job
    from dtrain_dagster.jobs.log_follower import follow_logs

    settings = read_settings()
    manager = cluster_of(settings)[0].manager()
    job_id = find_job(settings, job_id)
    if not follow and not as_json:
        say(manager.job_logs(job_id, node_id=node, tail=tail))
        return
    manager.job_status(job_id)
    follower = follow_logs(manager, run_dir(settings, job_id), settings.kind.shares_home)
    if tail is not None:
        follower.skip_to_end(keep_lines=tail)
    if not follow:
        if node is not None:
            manager.job_logs(job_id, node_id=node, tail=0)  # refuses a node that has no log
        print_json_lines(follower.read(node, to_the_end=True))
        return
    show = print_json_lines if as_json else partial(print_lines, console())
    try:
        stream_job(show, manager, job_id, follower, node)
    except KeyboardInterrupt:
        say_that_it_runs_on(settings, job_id)
        sys.exit(EXIT_INTERRUPTED)


@main.command()
@job_argument()
@refuses
def cancel(job_id: str) -> None:
    """Stop a job after it has written a checkpoint.

    A job that does not stop in time is killed. The command returns when no process is left, or when Azure ML says
    that the job has ended.

    On the local cluster it is killed after 8 seconds, or after DTRAIN_STOP_GRACE_SECONDS as it was set when the job
    started.

    \b
    Examples:
      dtrain cancel latest
      dtrain cancel train-20261126-1425
    """
    settings = read_settings()
    manager = cluster_of(settings)[0].manager()
    job_id = find_job(settings, job_id)
    before = manager.job_status(job_id).state
    manager.cancel_job(job_id)
    after = manager.job_status(job_id).state
    say(f"job {job_id}: {after}" + (" already" if before.is_final else ""))


@main.command()
@job_argument(required=False)
@json_option(json_fields.SUMMARY)
@refuses
def summary(job_id: str | None, as_json: bool) -> None:
    """Show the result of a training that has ended.

    Without JOB it shows the last training that Dagster materialized.

    \b
    Examples:
      dtrain summary
      dtrain summary latest --json
    """
    from dtrain_dagster.cli.summary import latest_job, print_summary, summary_document
    from trainer.rundir import RESULT

    settings = read_settings()
    rundir = run_dir(settings, find_job(settings, job_id)) if job_id else latest_job(settings)
    if rundir is None:
        raise Refusal("nothing was materialized yet; name a job, see `dtrain jobs`")
    result = rundir.read_json(RESULT)
    if result is None or result["status"] != "succeeded":
        raise Refusal(f"{rundir.uri} does not hold a training that succeeded; see `dtrain jobs`")
    if as_json:
        print_json(summary_document(settings, rundir))
    else:
        print_summary(settings, rundir)

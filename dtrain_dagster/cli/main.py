"""`dtrain`: the cluster from a shell, whichever kind it is. Each command imports what it needs, so that ``--help``
answers at once. The commands that start something are in `dtrain_dagster.cli.train` and `dtrain_dagster.cli.launch`.
"""

from __future__ import annotations

import sys
import time

import click

from dtrain_dagster.cli.azure_doctor import azure
from dtrain_dagster.cli.common import (
    EXIT_INTERRUPTED,
    Refusal,
    cluster_of,
    console,
    print_summary,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.costs import cost
from dtrain_dagster.cli.data import data
from dtrain_dagster.cli.endpoint import endpoint
from dtrain_dagster.cli.fleet import fleet
from dtrain_dagster.cli.home import clean, setup, work
from dtrain_dagster.cli.init import init
from dtrain_dagster.cli.kubernetes import kubernetes
from dtrain_dagster.cli.launch import launch
from dtrain_dagster.cli.monitoring import dashboard, profile, report, watch
from dtrain_dagster.cli.prices import prices
from dtrain_dagster.cli.ray import ray
from dtrain_dagster.cli.search import search
from dtrain_dagster.cli.sections import SectionedGroup
from dtrain_dagster.cli.slurm import slurm
from dtrain_dagster.cli.train import train
from dtrain_dagster.cli.tune import tune
from dtrain_dagster.cli.web import mlflow, tensorboard, ui

READERS = 16
"""The number of run directories that are read in parallel."""


@click.group(cls=SectionedGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run distributed trainings on the cluster, follow them, and stop them.

    On the local cluster a node is a group of processes on this machine. With DTRAIN_CLUSTER=azure_ml nodes are Azure
    ML's. A job outlives the shell that started it; everything about it is in its run directory, in
    DTRAIN_HOME/storage/jobs or DTRAIN_STORAGE/jobs. Unless it is set, DTRAIN_HOME is the folder .dtrain of the working
    directory, or of the nearest folder above it that has one.
    """


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
    *(ray, ui, mlflow, tensorboard, setup, clean, work),
)
for command in COMMANDS:
    main.add_command(command)


@main.command()
@refuses
def jobs() -> None:
    """List the jobs of the cluster, newest first."""
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    from dtrain_dagster.cli.terminal import ListedJob, jobs_table
    from dtrain_dagster.clusters.base import JobStatus
    from dtrain_dagster.jobs.progress import last_step
    from dtrain_dagster.jobs.totals import sum_presences
    from trainer.documents.presences import stale_seconds
    from trainer.errors import DamagedError
    from trainer.rundir import LAUNCH

    settings, now = read_settings(), time.time()
    manager = cluster_of(settings)[0].manager()

    def row(status: JobStatus) -> ListedJob:
        rundir = run_dir(settings, status.job_id)
        if status.damage:
            return ListedJob(status=status)
        try:
            launch, seconds = rundir.read_json(LAUNCH) or {}, None
            if launch.get("launch", 1) > 1:  # the status is of the last one
                stale = stale_seconds(rundir.storage)
                seconds = sum_presences(rundir.nodes(), not status.state.is_final, now, stale).seconds
            return ListedJob(
                status=status, nodes=launch.get("node_count", 0), step=last_step(rundir), seconds=seconds
            )  # fmt: skip
        except (DamagedError, OSError) as error:  # no job hides the others
            return ListedJob(status=replace(status, damage=str(error)))

    with ThreadPoolExecutor(READERS) as pool:
        rows = list(pool.map(row, manager.list_jobs()))
    if not rows:
        say(f"no jobs in {settings.jobs_uri}")
        return
    console().print(jobs_table(rows, now))


@main.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@refuses
def status(job_id: str | None) -> None:
    """Show how one job, or the cluster's nodes, stand now.

    Without JOB it shows the nodes. `dtrain watch` follows a job.
    """
    from dtrain_dagster.cli.terminal import print_health, print_status

    settings = read_settings()
    manager = cluster_of(settings)[0].manager()
    if job_id is None:
        print_health(console(), manager.monitor_health())
    else:
        print_status(console(), manager.job_status(job_id), run_dir(settings, job_id), time.time())


@main.command()
@click.argument("job_id", metavar="JOB")
@click.option("--node", type=click.IntRange(min=0), metavar="K", help="Of this node alone.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each node.")
@refuses
def logs(job_id: str, node: int | None, follow: bool, tail: int | None) -> None:
    """Print what the processes of a job have printed.

    With --follow, Ctrl-C ends the following, not the job.
    """
    from dtrain_dagster.cli.terminal import stream_job
    from dtrain_dagster.jobs.log_follower import follow_logs

    settings = read_settings()
    manager = cluster_of(settings)[0].manager()
    if not follow:
        say(manager.job_logs(job_id, node_id=node, tail=tail))
        return
    manager.job_status(job_id)
    follower = follow_logs(manager, run_dir(settings, job_id), settings.kind.shares_home)
    if tail is not None:
        follower.skip_to_end(keep_lines=tail)
    try:
        stream_job(console(), manager, job_id, follower, node)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@main.command()
@click.argument("job_id", metavar="JOB")
@refuses
def cancel(job_id: str) -> None:
    """Stop a job, which first writes a checkpoint.

    One that does not end in time is ended by force. The command returns when no process is left, or when Azure ML says
    that the job has ended.

    On the local cluster, by force means after 8 seconds, or DTRAIN_STOP_GRACE_SECONDS as it was set when the job was
    started.
    """
    manager = cluster_of(read_settings())[0].manager()
    before = manager.job_status(job_id).state
    manager.cancel_job(job_id)
    after = manager.job_status(job_id).state
    say(f"job {job_id}: {after}" + (" already" if before.is_final else ""))


@main.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@refuses
def summary(job_id: str | None) -> None:
    """Show the result of a training that has ended.

    Without JOB it is the last one that Dagster materialized.
    """
    from dtrain_dagster.cli.summary import latest_job
    from trainer.rundir import RESULT

    settings = read_settings()
    rundir = run_dir(settings, job_id) if job_id else latest_job(settings)
    if rundir is None:
        raise Refusal("nothing was materialized yet; name a job, see `dtrain jobs`")
    result = rundir.read_json(RESULT)
    if result is None or result["status"] != "succeeded":
        raise Refusal(f"{rundir.uri} holds no training that succeeded; see `dtrain jobs`")
    print_summary(rundir)

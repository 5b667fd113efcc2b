"""`dtrain`: the local cluster from a shell. Each command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from dtrain_dagster.cli_endpoint import endpoint
from dtrain_dagster.cli_monitoring import COMMANDS as MONITORING

if TYPE_CHECKING:
    from rich.console import Console

    from dtrain_dagster.clusters.base import JobStatus
    from dtrain_dagster.clusters.local import LocalClusterManager
    from dtrain_dagster.settings import Settings
    from trainer.rundir import RunDir

EXIT_UNUSABLE, EXIT_INTERRUPTED, EXIT_STOPPED = 2, 130, 143
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Refusal(click.ClickException):
    """What was asked for cannot be done; the message says why and what to do instead."""

    exit_code = EXIT_UNUSABLE


def refuses(command: Callable[..., None]) -> Callable[..., None]:
    """Errors that a user can cause end the command with their message instead of a traceback."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        from dtrain_dagster.clusters.base import ClusterError
        from dtrain_dagster.settings import SettingsError
        from trainer.config import ConfigError

        try:
            command(*args, **options)
        except (ClusterError, ConfigError, SettingsError) as error:
            raise Refusal(str(error)) from None

    return run


def _size_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option(
        "--procs-per-node",
        type=click.IntRange(min=1),
        metavar="P",
        help="Processes on each node.  [default: DTRAIN_PROCESSES_PER_NODE, else 1]",
    )(command)
    return click.option(
        "--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes.  [default: DTRAIN_NODES, else 3]"
    )(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run distributed trainings on the local cluster, follow them, and stop them.

    A node is a group of processes on this machine. A job outlives the shell that started it; everything about it is
    in DTRAIN_HOME/storage/jobs (DTRAIN_HOME is .dtrain in the working directory unless it is set).
    """


for _command in (endpoint, *MONITORING):
    main.add_command(_command)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_size_options
@click.option("--name", metavar="ID", help="Id of the job.  [default: made from the time]")
@click.option("--master-port", type=click.IntRange(1, 65535), help="Port of rank 0.  [default: a free one]")
@click.option("--detach", is_flag=True, help="Print the id of the job and leave it running.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@refuses
def launch(
    nodes: int | None,
    procs_per_node: int | None,
    name: str | None,
    master_port: int | None,
    detach: bool,
    command: tuple[str, ...],
) -> None:
    """Run a script of your own on N nodes.

    COMMAND runs once per process with the variables that torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and so on. A path that ends in .py is run with the Python that runs dtrain. The exit code is that of the
    process that failed first, 0 if none did. Ctrl-C cancels the job.

    \b
    Examples:
      dtrain launch --nodes 2 --procs-per-node 2 -- python my_script.py --epochs 3
      dtrain launch --nodes 3 --name trial-1 my_script.py
      dtrain launch --detach --name night my_script.py && dtrain logs --follow night
    """
    from dtrain_dagster.cli_job import job_environment, runnable
    from dtrain_dagster.clusters.base import JobSpec
    from dtrain_dagster.terminal import LogFollower, stream_job

    settings = _settings()
    manager = _manager(settings, procs_per_node)
    job_id = _new_job(manager, name, "launch")
    manager.provision_cluster(nodes or settings.nodes, settings.gpu_type)
    folder = manager.jobs_dir / job_id
    follower = LogFollower(folder / "logs")
    follower.skip_to_end()
    spec = JobSpec(
        job_id=job_id,
        run_dir=str(folder),
        command=runnable(command),
        node_count=nodes or settings.nodes,
        processes_per_node=manager.processes_per_node,
        env=job_environment(settings),
        master_port=master_port,
    )
    with _cancelled_by_signals(manager, job_id, unless=detach):
        manager.submit_job(spec)
        if detach:
            click.echo(job_id)
            return
        _announce(job_id, spec.node_count, spec.processes_per_node)
        status = stream_job(_console(), manager, job_id, follower)
    _end(manager, status)


@main.command()
@click.option("--config", metavar="JOB.JSON", help="A job.json, see trainer.config.")
@click.option("--dataset", metavar="FOLDER|ID|latest", help="A dataset, instead of --config.")
@click.option("--model", help="tcn, lstm, transformer, or your own as package.module:factory.")
@click.option("--loss", help="student_t, gaussian, mse, or your own as package.module:factory.")
@click.option("--epochs", type=click.IntRange(min=1))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Any field, as training.epochs=2.")
@_size_options
@click.option("--name", metavar="ID", help="Id of the job.  [default: that of --config, or made from the time]")
@click.option("--detach", is_flag=True, help="Print the id of the job and leave it running.")
@refuses
def train(
    config: str | None,
    dataset: str | None,
    model: str | None,
    loss: str | None,
    epochs: int | None,
    overrides: tuple[str, ...],
    nodes: int | None,
    procs_per_node: int | None,
    name: str | None,
    detach: bool,
) -> None:
    """Train a model with `python -m trainer` on N nodes.

    The working directory is on the processes' PYTHONPATH, so a model of your own is found there. Started again under
    the same id, a job that failed or was cancelled goes on from its latest checkpoint. Ctrl-C cancels the job.

    \b
    Examples:
      dtrain train --dataset latest --nodes 3
      dtrain train --dataset <id> --model my_models:make_model --epochs 2 --set training.learning_rate=1e-3
      dtrain train --config job.json --nodes 2 --procs-per-node 2
    """
    from dtrain_dagster.cli_job import dataset_config, job_environment, plan_job, read_config, total_steps
    from dtrain_dagster.jobs import start_job
    from dtrain_dagster.terminal import watch_training
    from trainer.rundir import RunDir

    settings = _settings()
    manager = _manager(settings, procs_per_node)
    if (config is None) == (dataset is None):
        raise click.UsageError("give either --config or --dataset", click.get_current_context())
    shortcuts = {"model.factory": model, "loss.factory": loss, "training.epochs": epochs}
    given = [f"{key}={json.dumps(value)}" for key, value in shortcuts.items() if value is not None]
    text = read_config(config) if config else dataset_config(settings, dataset or "")
    if name or dataset:
        given.append(f"job_id={json.dumps(_new_job(manager, name, 'train'))}")
    job, node_count = plan_job(
        text, config or "the command line", [*given, *overrides], nodes, manager.processes_per_node, settings
    )
    _new_job(manager, job.job_id, "train")
    steps = total_steps(job)
    manager.provision_cluster(node_count, settings.gpu_type)
    with _cancelled_by_signals(manager, job.job_id, unless=detach):
        start_job(manager, job, node_count, manager.processes_per_node, job_environment(settings))
        if detach:
            click.echo(job.job_id)
            return
        _announce(job.job_id, node_count, manager.processes_per_node)
        status = watch_training(_console(), manager, RunDir(job.run_dir), job.job_id, steps)
    if status.state == "succeeded":
        _print_summary(RunDir(job.run_dir))
    _end(manager, status)


@main.command()
@refuses
def jobs() -> None:
    """List the jobs of the cluster, newest first."""
    from dtrain_dagster.terminal import jobs_table, last_step
    from trainer.rundir import LAUNCH, RunDir

    manager = _manager(_settings())
    rows = []
    for status in manager.list_jobs():
        rundir = RunDir(str(manager.jobs_dir / status.job_id))
        launched = rundir.read_json(LAUNCH) or {}
        rows.append((status, launched.get("node_count", 0), last_step(rundir)))
    if not rows:
        click.echo(f"no jobs in {manager.jobs_dir}")
        return
    _console().print(jobs_table(rows, time.time()))


@main.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@refuses
def status(job_id: str | None) -> None:
    """How a job stands, or, without JOB, how the cluster does."""
    from dtrain_dagster.terminal import age, health_table, nodes_table, progress_line, state_text, time_of

    manager, console = _manager(_settings()), _console()
    if job_id is None:
        health = manager.monitor_health()
        console.print(
            f"cluster {health.cluster_name}: {health.message or ('healthy' if health.healthy else 'unhealthy')}"
        )
        if health.nodes:
            console.print(health_table(health.nodes))
        return
    from dtrain_dagster.jobs import Progress, advance
    from trainer.rundir import RunDir

    state = manager.job_status(job_id)
    rundir = RunDir(str(manager.jobs_dir / job_id))
    console.print(f"job {job_id}: ", state_text(state.state), sep="")
    console.print(f"started {time_of(state.started_at)}, {age(state, time.time())}", highlight=False)
    events = list(rundir.events())
    if events:
        from dataclasses import replace

        progress = replace(advance(Progress(), events), nodes_alive=state.nodes_alive)
        console.print(progress_line(progress, None), highlight=False, markup=False)
    console.print(nodes_table(rundir.nodes(), time.time()))
    if state.message:
        console.print(state.message, markup=False, highlight=False, soft_wrap=True)


@main.command()
@click.argument("job_id", metavar="JOB")
@click.option("--node", type=click.IntRange(min=0), metavar="K", help="Of this node alone.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each node.")
@refuses
def logs(job_id: str, node: int | None, follow: bool, tail: int | None) -> None:
    """What a job's processes printed; of finished jobs as well. Ctrl-C ends the following, not the job."""
    from dtrain_dagster.terminal import LogFollower, stream_job

    manager = _manager(_settings())
    if not follow:
        click.echo(manager.job_logs(job_id, node_id=node, tail=tail))
        return
    manager.job_status(job_id)
    follower = LogFollower(manager.jobs_dir / job_id / "logs")
    if tail is not None:
        follower.skip_to_end(keep_lines=tail)
    try:
        stream_job(_console(), manager, job_id, follower, node)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@main.command()
@click.argument("job_id", metavar="JOB")
@refuses
def cancel(job_id: str) -> None:
    """Stop a job: in order, so that it can write a checkpoint, then by force. Returns when no process is left.

    By force means after 8 seconds, or DTRAIN_STOP_GRACE_SECONDS as it was set when the job was started.
    """
    manager = _manager(_settings())
    before = manager.job_status(job_id).state
    manager.cancel_job(job_id)
    after = manager.job_status(job_id).state
    click.echo(f"job {job_id}: {after}" + (" already" if before.is_final else ""))


@main.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@refuses
def summary(job_id: str | None) -> None:
    """What a training came to: the given job's, or that of the last one that Dagster materialized."""
    from dtrain_dagster.summary import latest_job
    from trainer.rundir import RESULT, RunDir

    settings = _settings()
    rundir = RunDir(f"{settings.jobs_uri}/{job_id}") if job_id else latest_job(settings)
    if rundir is None:
        raise Refusal("nothing was materialized yet; name a job, see `dtrain jobs`")
    result = rundir.read_json(RESULT)
    if result is None or result["status"] != "succeeded":
        raise Refusal(f"{rundir.uri} holds no training that succeeded; see `dtrain jobs`")
    _print_summary(rundir)


def _settings() -> Settings:
    from dtrain_dagster.settings import load_settings

    return load_settings()


def _manager(settings: Settings, processes_per_node: int | None = None) -> LocalClusterManager:
    from dtrain_dagster.clusters.local import LocalClusterManager

    if settings.cluster != "local":
        raise Refusal(
            f"DTRAIN_CLUSTER={settings.cluster}: this command knows the local cluster only; jobs of the cloud are in "
            "the Dagster UI (gpu_cluster, trained_checkpoint), in Azure ML studio, and in their run directories"
        )
    return LocalClusterManager(
        home=settings.home,
        cluster_name=settings.cluster_name,
        gpu_type=settings.gpu_type,
        processes_per_node=processes_per_node or settings.processes_per_node,
        threads_per_rank=settings.threads_per_rank,
        max_replacements=settings.max_replacements,
        replacement_delay_seconds=settings.replacement_delay_seconds,
    )


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)  # a pipe has no width of its own


def _new_job(manager: LocalClusterManager, name: str | None, kind: str) -> str:
    """The id to use. `Refusal` for one that runs or is done."""
    from dtrain_dagster.clusters.base import ClusterError, JobState

    if name is None:
        return f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    if not _JOB_ID.fullmatch(name):
        raise Refusal(f"--name {name!r}: letters, digits, dots, dashes and underscores, a letter or digit first")
    try:
        state = manager.job_status(name).state
    except ClusterError:
        return name
    if not state.is_final:
        raise Refusal(f"job {name} is {state} already: `dtrain logs --follow {name}` or `dtrain cancel {name}`")
    if state is JobState.SUCCEEDED:
        raise Refusal(f"job {name} has succeeded already: choose another --name, or see `dtrain logs {name}`")
    return name


class _Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _cancelled_by_signals(manager: LocalClusterManager, job_id: str, unless: bool) -> Iterator[None]:
    """Ctrl-C or SIGTERM inside cancels the job and ends the command, ``unless`` it is to be left running."""

    def terminate(*_: object) -> None:
        raise _Terminated

    if unless:
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (KeyboardInterrupt, _Terminated) as error:
        from dtrain_dagster.clusters.base import ClusterError

        click.echo(f"cancelling job {job_id}", err=True)
        with suppress(ClusterError):  # it was not submitted yet
            manager.cancel_job(job_id)
        sys.exit(EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_STOPPED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _announce(job_id: str, nodes: int, processes_per_node: int) -> None:
    each = "" if processes_per_node == 1 else f", {processes_per_node} processes on each"
    click.echo(f"job {job_id}: {nodes} node{'s' if nodes > 1 else ''}{each}", err=True)


def _end(manager: LocalClusterManager, status: JobStatus) -> None:
    """Say how the job ended, and exit as it did."""
    from trainer.rundir import STATUS, RunDir

    if status.state == "succeeded":
        return
    click.echo(f"job {status.job_id} {status.state}: {status.message}", err=True)
    final = RunDir(str(manager.jobs_dir / status.job_id)).read_json(STATUS) or {}
    sys.exit(final.get("exit_code") or 1)  # none was written where the disk is full


def _print_summary(rundir: RunDir) -> None:
    from dtrain_dagster.summary import summary_lines
    from dtrain_dagster.terminal import pairs_table

    _console().print(pairs_table(summary_lines(rundir)), highlight=False)

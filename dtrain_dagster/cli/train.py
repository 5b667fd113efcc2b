"""`dtrain train`: it starts a training on the cluster and follows it; Ctrl-C cancels it.

The functions that `dtrain tune` (`dtrain_dagster.cli.tune`) needs as well are public here.

Added to `dtrain` by `dtrain_dagster.cli.main`. Each command imports what it needs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from dtrain_dagster.cli.common import (
    cluster_of,
    console,
    ranks_of,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.job_life import (
    announce,
    cancelled_by_signals,
    end,
    new_job_id,
    runs_already,
    say_what_was_got,
    take_over,
)
from dtrain_dagster.cli.job_names import complete_datasets, complete_files, complete_jobs

if TYPE_CHECKING:
    from dtrain_dagster.settings.environment import Settings
    from trainer.config import JobConfig


def size_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of a job's size."""
    command = click.option(
        "--procs-per-node",
        type=click.IntRange(min=1),
        metavar="P",
        help="Processes on each node.  [default: DTRAIN_PROCESSES_PER_NODE, else one per GPU]",
    )(command)
    return click.option(
        "--nodes", type=click.IntRange(min=1), metavar="N", help="Nodes.  [default: DTRAIN_NODES, else 3]"
    )(command)


def training_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options that describe a training: its data, model, loss, fields and nodes."""
    options = (
        click.option(
            "--config", metavar="JOB.JSON", shell_complete=complete_files, help="A job.json, with any field of a job."
        ),
        click.option(
            "--dataset",
            metavar="FOLDER|ID|latest|FUNCTION",
            shell_complete=complete_datasets,
            help="A dataset, or a function that makes one, instead of --config.",
        ),
        click.option(
            "--model",
            metavar="NAME",
            help="A stock model, such as tcn, mlp or gpt, or your own as package.module:factory.",
        ),
        click.option(
            "--loss", metavar="NAME", help="A stock loss, or your own.  [default: the usual one of the kind of dataset]"
        ),
        click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Passes over the training data."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any field, such as training.epochs=2. May be repeated.",
        ),
        size_options,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@training_options
@click.option(
    "--script",
    metavar="FILE.PY",
    shell_complete=complete_files,
    help="A script that calls Trainer(…).fit(…); its arguments come after --.",
)
@click.option("--backend", metavar="NAME", help="pytorch-ddp, pytorch-fsdp, horovod or deepspeed; or gloo or nccl.")
@click.option(
    "--settings",
    "settings_file",
    metavar="FILE",
    shell_complete=complete_files,
    help="What `dtrain tune` or `dtrain search` has written; other options win.",
)
@click.option(
    "--name",
    metavar="JOB",
    shell_complete=complete_jobs,
    help="Name of the job; an existing job continues.  [default: that of --config, or from the time]",
)
@click.option(
    "--change",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting to change when a job continues, such as training.epochs=12. May be repeated.",
)
@click.option("--detach", is_flag=True, help="Print the name of the job and leave it running.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
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
    script: str | None,
    backend: str | None,
    settings_file: str | None,
    name: str | None,
    changes: tuple[str, ...],
    detach: bool,
    arguments: tuple[str, ...],
) -> None:
    """Train a model on N nodes, without Dagster.

    Your own model is looked up in the working directory and on PYTHONPATH. On Azure ML, its modules are sent to the
    nodes, and a dataset on this machine is copied to where they can read it. With the name of a job that failed or was
    cancelled, it continues from the job's latest checkpoint, with what --change names; a running job is followed.
    Ctrl-C cancels the job.

    On Azure ML the command that follows a job submits it again if it loses its nodes; with --detach nothing does.

    The training is recorded in MLflow (`dtrain mlflow`), a continued one in the run in which it began. With
    DTRAIN_COMMAND_TRACKING=off or --set tracking.mlflow_tracking_uri=null this start is not recorded.

    \b
    Examples:
      dtrain train --dataset latest --nodes 3
      dtrain train --dataset latest --epochs 2 --set training.learning_rate=1e-3
      dtrain train --dataset latest --model my_models:make_model --name mine
      dtrain train --config job.json --nodes 2 --procs-per-node 2
      dtrain train --dataset latest --settings tuned.json
      dtrain train --dataset latest --nodes 3 --backend horovod
      dtrain train --script my_training.py --nodes 3 -- --width 64
    """
    from dtrain_dagster.cli.going_on import command_again, dataset_name, say_how_to_go_on, typed_arguments
    from dtrain_dagster.cli.job_options import as_begun, total_steps, with_reachable_data
    from dtrain_dagster.cli.script_job import order_script, refuse_with_script, script_to_go_on, train_script
    from dtrain_dagster.cli.summary import print_summary
    from dtrain_dagster.cli.terminal import watch_training
    from dtrain_dagster.cli.time_left import LeftClock, expect_finish
    from dtrain_dagster.cli.tracking import track, try_to_record_end
    from dtrain_dagster.jobs.progress import start_job
    from dtrain_dagster.support.user_sources import ensure_importable

    settings = read_settings(procs_per_node, nodes)
    if not (script or config or dataset or arguments) and (known := script_to_go_on(settings, name)) is not None:
        script, arguments, overrides = known.script, known.arguments, (*known.overrides, *overrides)
        nodes = nodes or known.nodes
        settings = read_settings(procs_per_node or known.processes_per_node, nodes)
    if script is not None:
        refuse_with_script(
            {"--config": config, "--dataset": dataset, "--model": model, "--loss": loss, "--settings": settings_file}
        )
        asked = [*as_overrides(None, None, epochs), *backend_overrides(backend), *overrides]
        ordered = order_script(settings, script, arguments, [*asked, *changes], nodes, name)
        return train_script(settings, ordered, asked, nodes or settings.nodes, detach, changes)
    if arguments:
        raise click.UsageError(f"arguments belong to a --script: {arguments[0]}", click.get_current_context())
    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    asked = [*as_overrides(model, loss, epochs), *backend_overrides(backend), *overrides]
    job_id = new_job_id(name, "train") if name or dataset else None
    if job_id and not (config or dataset) and run_dir(settings, job_id).storage.exists("job.json"):
        config = f"{run_dir(settings, job_id).uri}/job.json"  # it goes on as it was planned
    with in_words_of_options({"--model": model, "--loss": loss, "--epochs": epochs}):
        job, node_count = job_of_options(settings, config, dataset, asked, nodes, job_id, settings_file)
        rundir = run_dir(settings, new_job_id(job.job_id, "train"))
        runs = runs_already(cluster.manager(), job.job_id)
        steps, is_new = total_steps(job), not rundir.storage.exists("job.json")
        if not runs:
            say_what_is_wrong(job, node_count, settings, rehearses=is_new)
    tracked = track(job, asked, settings, cluster, project)
    job = as_begun(with_reachable_data(tracked.job, settings), runs, changes)
    if runs:
        say(f"job {job.job_id} is already running, so no new one is started", err=True)
    else:
        say_what_was_got(manager.provision_cluster(node_count, cluster.sku), cluster.sku)
    ensure_importable()  # for a manager that sends a user's modules to its nodes
    take_over(rundir)
    again = command_again(typed_arguments(), "" if config and not name else job.job_id, dataset_name(job))
    with cancelled_by_signals(
        manager, job.job_id, unless=detach, then=lambda: say_how_to_go_on(settings, job.job_id, again)
    ):
        start_job(manager, job, node_count, ranks_of(settings), cluster.node_env(project) | tracked.env)
        if detach:
            say(job.job_id)
            say(f"follow it: dtrain watch {job.job_id}", err=True)
            return
        announce(rundir)
        clock = LeftClock(rundir, lambda: expect_finish(settings, rundir))
        status = watch_training(console(), manager, rundir, job.job_id, steps if is_new else None, clock)
    if status.state == "succeeded":
        print_summary(settings, rundir)
    try_to_record_end(settings, cluster, project, tracked, rundir)
    end(settings, rundir, status, again)


def as_overrides(model: str | None, loss: str | None, epochs: int | None) -> list[str]:
    """Return the short options as ``--set`` takes them."""
    shortcuts = {"model.factory": model, "loss.factory": loss, "training.epochs": epochs}
    return [f"{key}={json.dumps(value)}" for key, value in shortcuts.items() if value is not None]


def backend_overrides(name: str | None) -> list[str]:
    """Return the fields that ``--backend`` stands for, as ``--set`` takes them. Raise `ConfigError` for a name that is
    unknown."""
    from trainer.strategies import settings_of_backend

    fields = {} if name is None else settings_of_backend(name)
    return [f"training.{field}={json.dumps(value)}" for field, value in fields.items()]


def job_of_options(
    settings: Settings,
    config: str | None,
    dataset: str | None,
    asked: Sequence[str],
    nodes: int | None,
    job_id: str | None = None,
    settings_file: str | None = None,
) -> tuple[JobConfig, int]:
    """Return the job that the options describe, and the number of its nodes. ``asked``: overrides, which come last.
    Raise as `plan_job` does."""
    from dtrain_dagster.cli.job_options import dataset_config, plan_job, read_config
    from dtrain_dagster.planning.tuned_settings import read_tuned

    if (config is None) == (dataset is None):
        context = click.get_current_context()
        others = (
            "one of --dataset, --config and --script"
            if context.info_name == "train"
            else "either --config or --dataset"
        )
        raise click.UsageError(f"give {others}", context)
    has_own_model = any(field.startswith(("model=", "model.factory=")) for field in asked)
    text = read_config(config) if config else dataset_config(settings, dataset or "", has_own_model)
    given = [*([f"job_id={json.dumps(job_id)}"] if job_id else []), *asked]
    job, node_count = plan_job(text, config or "the command line", given, nodes, settings)
    if settings_file:
        own = {"threads_per_rank"} if settings.threads_per_rank else set()  # DTRAIN_THREADS_PER_RANK
        found = read_tuned(settings_file)
        tuned, words = found.settings_for(job, stated_fields(asked) | own)
        for sentence in words:
            say(f"note: {sentence}", err=True)
        given += [f"{part}={json.dumps(value)}" for part, value in found.parts_for(job).items()]
        given += [f"training.{field}={json.dumps(value)}" for field, value in tuned.items()]  # none of them is stated
        job, node_count = plan_job(text, config or "the command line", given, nodes, settings)
    return job, node_count


@contextmanager
def in_words_of_options(options: Mapping[str, object]) -> Iterator[None]:
    """Let errors within the block name the options that were given instead of the fields of ``job.json`` that they
    stand for. ``options``: each option's value, None where it was not given."""
    from trainer.config import ConfigError

    fields = {"--model": "model.factory", "--loss": "loss.factory", "--epochs": "training.epochs"}
    try:
        yield
    except ConfigError as error:
        text = str(error).removeprefix("the command line: ")
        for option, field in fields.items():
            if options.get(option) is not None:
                text = text.replace(field, option)
        raise ConfigError(text) from None


def stated_fields(asked: Sequence[str]) -> set[str]:
    """Return the fields of ``training`` that these overrides set, one by one or as a whole. Pure."""
    found: set[str] = set()
    for item in asked:
        key, _, value = item.partition("=")
        section, _, name = key.partition(".")
        if section == "training":
            found |= {name.partition(".")[0]} if name else set(json.loads(value))
    return found


def say_what_is_wrong(job: JobConfig, node_count: int, settings: Settings, rehearses: bool = True) -> None:
    """Check a training before nodes are bought, and print what could not be checked, which GPUs would be idle, and
    whether the size is retired. Raise as `dtrain_dagster.planning.check_job.check_job` does."""
    from dtrain_dagster.clusters.ranks import explain_idle_gpus, have_gpus, hosts_of
    from dtrain_dagster.costs.prices import alternatives_to, price_of
    from dtrain_dagster.planning.check_job import check_job, check_strategy
    from dtrain_dagster.planning.memory_fit import room_of
    from dtrain_dagster.settings.engines import read_engine_options

    gpus = read_engine_options(settings.cluster).get("gpus", 0) if settings.kind.has_engine else None
    hosts, has_gpus = hosts_of(settings.kind, node_count), have_gpus(settings.kind, settings.gpu_type, gpus)
    ranks, price = ranks_of(settings), price_of(settings.gpu_type)
    said = check_strategy(job.training, hosts, has_gpus, settings.kind.is_this_machine)
    room, prices = room_of(settings.kind, price, settings.tiers[0], node_count, ranks), alternatives_to(price.sku)
    checked = check_job(
        job, node_count * ranks, rehearses, hosts, has_gpus, room, prices.values() if settings.kind.buys_nodes else ()
    )
    for sentence in (*said, *checked.sentences):
        say(sentence, err=True)
    if settings.cluster == "azure_ml":
        from dtrain_dagster.clusters.azure_ml.gpu_nodes import explain_retired

        if retired := explain_retired(price.sku, datetime.now(UTC).date()):
            say(retired, err=True)
    hourly = node_count * price.usd_per_hour(settings.tiers[0])
    if settings.kind.buys_nodes and (idle := explain_idle_gpus(price, ranks, node_count, hourly, is_local=False)):
        say(f"in each hour: {idle}", err=True)

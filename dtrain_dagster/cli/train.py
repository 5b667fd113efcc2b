"""`dtrain train`: it starts a training on the cluster and follows it; Ctrl-C cancels it.

The options that describe a training, and the checks before nodes are bought, serve `dtrain tune`, `search` and `fleet`
as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from dtrain_dagster.cli.common import (
    Refusal,
    cluster_of,
    console,
    manager_of,
    ranks_of,
    read_settings,
    refuses,
    run_dir,
    say,
)
from dtrain_dagster.cli.doctor import show_dry_run
from dtrain_dagster.cli.facts import priced_summary
from dtrain_dagster.cli.follow import follow_training
from dtrain_dagster.cli.job_names import complete_datasets
from dtrain_dagster.cli.job_options import (
    as_begun,
    job_of_options,
    order_script,
    say_what_is_wrong,
    script_to_go_on,
    total_steps,
    try_to_keep_script,
    with_reachable_data,
)
from dtrain_dagster.cli.plan_lines import expect, promising_training
from dtrain_dagster.cli.screen import pairs_table
from dtrain_dagster.cli.start import (
    How,
    dataset_name,
    finish,
    new_job_id,
    runs_already,
    say_what_was_got,
    start_and_follow,
    start_options,
    take_over,
    this_command_again,
)
from dtrain_dagster.cli.tracking import (
    refuse_unregistrable,
    track,
    try_to_record_end,
    try_to_register,
    unregistered_job,
)
from dtrain_dagster.jobs.start import spec_of, start_job
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.user_sources import ensure_importable
from trainer.config import ConfigError, JobConfig
from trainer.rundir import RunDir
from trainer.strategies import settings_of_backend


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A training as options describe it: its data, model, loss, fields and nodes."""

    config: str | None = None
    dataset: str | None = None
    model: str | None = None
    loss: str | None = None
    epochs: int | None = None
    overrides: tuple[str, ...] = ()
    nodes: int | None = None
    procs_per_node: int | None = None

    def settings(self) -> Settings:
        """Return the settings, in which these options come first."""
        return read_settings(self.procs_per_node, self.nodes)

    def fields(self, backend: str | None = None) -> list[str]:
        """Return the fields that are asked for, as ``--set`` takes them. Raise `ConfigError` for a backend that is
        unknown."""
        of_backend = {} if backend is None else settings_of_backend(backend)
        named = [f"training.{field}={json.dumps(value)}" for field, value in of_backend.items()]
        return [*as_overrides(self.model, self.loss, self.epochs), *named, *self.overrides]

    def job(
        self, settings: Settings, own: Sequence[str], job_id: str | None, settings_file: str | None = None
    ) -> tuple[JobConfig, int]:
        """Return `job_of_options` for these options, with ``own`` fields."""
        return job_of_options(settings, self.config, self.dataset, own, self.nodes, job_id, settings_file)

    def refuse_beside_script(self, **more: str | None) -> None:
        """Raise `Refusal` for an option that says what a script says itself."""
        own = {"config": self.config, "dataset": self.dataset, "model": self.model, "loss": self.loss, **more}
        for option, value in own.items():
            if value is not None:
                what = "the script has its own model, loss, data and settings"
                raise Refusal(f"--{option} cannot be combined with --script: {what}")

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Let errors within the block name the options that were given instead of the fields of ``job.json`` that they
        stand for."""
        fields = {"--model": "model.factory", "--loss": "loss.factory", "--epochs": "training.epochs"}
        try:
            yield
        except ConfigError as error:
            text = str(error).removeprefix("the command line: ")
            for option, field in fields.items():
                if getattr(self, option.removeprefix("--")) is not None:
                    text = text.replace(field, option)
            raise ConfigError(text) from None


def training_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options that describe a training, which it gets as `Asked`."""

    @wraps(command)
    def run(**options: Any) -> None:
        asked = Asked(**{field.name: options.pop(field.name) for field in fields(Asked)})
        command(asked=asked, **options)

    options = (
        click.option("--config", metavar="JOB.JSON", type=click.Path(), help="A job.json, with any field of a job."),
        click.option(
            "--dataset",
            metavar="FOLDER|ID|latest|FUNCTION",
            shell_complete=complete_datasets,
            help="A dataset, or a function that makes one, instead of --config.",
        ),
        click.option(
            "--model", metavar="NAME", help="A stock model, such as tcn or mlp, or your own as package.module:factory."
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
        run = option(run)
    return run


@click.command()
@training_options
@click.option(
    "--script",
    metavar="FILE.PY",
    type=click.Path(),
    help="A script that calls Trainer(…).fit(…); its arguments come after --.",
)
@click.option("--backend", metavar="NAME", help="pytorch-ddp, pytorch-fsdp, horovod or deepspeed; or gloo or nccl.")
@click.option(
    "--settings",
    "settings_file",
    metavar="FILE",
    type=click.Path(),
    help="What `dtrain tune` or `dtrain search` has written; other options win.",
)
@click.option(
    "--change",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting to change when a job continues, such as training.epochs=12. May be repeated.",
)
@start_options
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@refuses
def train(
    asked: Asked,
    script: str | None,
    backend: str | None,
    settings_file: str | None,
    changes: tuple[str, ...],
    arguments: tuple[str, ...],
    how: How,
) -> None:
    """Train a model on N nodes, without Dagster.

    Your own model is looked up in the working directory and on PYTHONPATH. On Azure ML, its modules are sent to the
    nodes, and a dataset on this machine is copied to where they can read it. With the name of a job that failed or was
    cancelled, it continues from the job's latest checkpoint, with what --change names; a running job is followed.
    Ctrl-C cancels the job.

    On Azure ML the command that follows a job submits it again if it loses its nodes; with --detach nothing does.

    With tracking.registered_model (or registry= in a script) the model is registered in MLflow at the end; after
    --detach, the same --name does that once the job has succeeded.

    The training is recorded in MLflow (`dtrain ui mlflow`), a continued one in the run in which it began. With
    DTRAIN_OPTIONS=command_tracking=off or --set tracking.mlflow_tracking_uri=null this start is not recorded.

    With --dry-run, what would be submitted is printed as it would be: commands and batch scripts, manifests, the
    description of computes and jobs; secrets are struck out. The exit code is 2 where the start would be refused.

    \b
    Examples:
      dtrain train --dataset latest --nodes 3
      dtrain train --dataset latest --epochs 2 --set training.learning_rate=1e-3
      dtrain train --dataset latest --model my_models:make_model --name mine
      dtrain train --config job.json --nodes 2 --procs-per-node 2
      dtrain train --dataset latest --settings tuned.json
      dtrain train --dataset latest --nodes 3 --backend horovod
      dtrain train --script my_training.py --nodes 3 -- --width 64
      dtrain train --dataset latest --nodes 3 --dry-run
    """
    settings, name = asked.settings(), how.name
    how.check(settings)
    if not (how.detach or how.is_dry) and (finished := unregistered_job(settings, name)) is not None:
        if not try_to_register(settings, *cluster_of(settings), finished, run_dir(settings, finished.job_id)):
            raise SystemExit(1)
        return
    if not (script or asked.config or asked.dataset or arguments):
        known = script_to_go_on(settings, name)
        if known is not None:
            script, arguments = known.script, known.arguments
            asked = replace(
                asked,
                overrides=(*known.overrides, *asked.overrides),
                nodes=asked.nodes or known.nodes,
                procs_per_node=asked.procs_per_node or known.processes_per_node,
            )
            settings = asked.settings()
    own = asked.fields(backend)
    if script is not None:
        asked.refuse_beside_script(settings=settings_file)
        found = order_script(settings, script, arguments, [*own, *changes], asked.nodes, name)
        job_id, nodes = found.job.job_id, asked.nodes or settings.nodes
        runs = runs_already(manager_of(settings), job_id)
        planned = Planned(found.job, nodes, found.total_steps, runs, this_command_again(job_id), found.command)
    elif arguments:
        raise click.UsageError(f"arguments belong to a --script: {arguments[0]}", click.get_current_context())
    else:
        planned = _plan(settings, asked, own, settings_file, name)
    _train(settings, planned, own, changes, how)


class Planned(NamedTuple):
    """A training that was checked and can be started."""

    job: JobConfig
    nodes: int
    steps: int
    runs: bool
    """Whether it runs already."""
    again: str
    """The command that goes on with it."""
    command: tuple[str, ...] | None = None
    """Of a script: what each process runs."""


def _plan(settings: Settings, asked: Asked, own: Sequence[str], settings_file: str | None, name: str | None) -> Planned:
    """Return the training that the options describe. Raise as `say_what_is_wrong` does."""
    job_id = new_job_id(name, "train") if name or asked.dataset else None
    if job_id and not (asked.config or asked.dataset) and run_dir(settings, job_id).storage.exists("job.json"):
        asked = replace(asked, config=f"{run_dir(settings, job_id).uri}/job.json")  # it goes on as it was planned
    with asked.in_its_words():
        job, nodes = asked.job(settings, own, job_id, settings_file)
        rundir = run_dir(settings, new_job_id(job.job_id, "train"))
        runs, steps = runs_already(manager_of(settings), job.job_id), total_steps(job)
        if not runs:
            say_what_is_wrong(job, nodes, settings, rehearses=not rundir.storage.exists("job.json"))
    again = this_command_again("" if asked.config and not name else job.job_id, dataset_name(job))
    return Planned(job, nodes, steps, runs, again)


def _train(settings: Settings, planned: Planned, own: Sequence[str], changes: Sequence[str], how: How) -> None:
    """Run a training on the cluster, follow it, and exit as it ends; or only show what would be submitted. ``own``:
    the overrides of the command; ``changes``: see `dtrain_dagster.cli.job_options.as_begun`."""
    job, nodes, steps, runs, again, command = planned
    cluster, project = cluster_of(settings)
    manager, job_id, ranks, rundir = cluster.manager(tends=True), job.job_id, ranks_of(settings), RunDir(job.run_dir)
    is_new = not rundir.storage.exists("job.json")
    # of a script without its arguments, in which it may take a token
    tracked = track(job, own, settings, cluster, project, Path(command[1]).name if command else "dtrain train")
    job = tracked.job if command else with_reachable_data(tracked.job, settings, copies=not how.is_dry)
    job, env, keep = as_begun(job, runs, changes), cluster.node_env(project) | tracked.env, how.keep_failed_seconds
    if command is None:
        ensure_importable()  # for a manager that sends a user's modules to its nodes
    if how.is_dry and not runs:
        spec, expected = spec_of(manager, job, nodes, ranks, env, command, keep), expect(settings, job, nodes)
        say(*expected.lines(), err=True)
        show_dry_run(settings, manager, spec, cluster.sku, expected.wanted(job_id), job)
    with ExitStack() as stack:
        if runs:
            say(f"job {job_id} is already running, so no new one is started", err=True)
            if keep:
                say("--keep-failed counts from its next start on", err=True)
            if how.is_dry:
                return
        else:
            refuse_unregistrable(cluster, project, job)
            stack.enter_context(promising_training(settings, job, nodes))
            got = manager.provision_cluster(nodes, cluster.sku)
            say_what_was_got(got, cluster.sku)
            if got.gpu_type != cluster.sku or got.tier not in (None, settings.tiers[0]):  # at another price
                stack.enter_context(promising_training(settings, job, nodes, got))
        take_over(rundir)

        def begin() -> None:
            start_job(manager, job, nodes, ranks, env, command=command, keep_failed_seconds=keep)
            if command and not runs:
                try_to_keep_script(settings, job_id, command, [*own, *changes], nodes, ranks)

        status = start_and_follow(
            settings,
            manager,
            job_id,
            begin,
            lambda: follow_training(settings, job_id, steps if is_new else None),
            again,
            detach=f"dtrain status {job_id} --follow" if how.detach else "",
        )
    if status is None:
        return
    if status.state == "succeeded" and command is None:
        console().print(pairs_table(priced_summary(settings, rundir)), highlight=False)
    try_to_record_end(settings, cluster, project, tracked, rundir)
    if status.state == "succeeded" and not try_to_register(settings, cluster, project, job, rundir):
        raise SystemExit(1)
    finish(settings, rundir, status, again)


def as_overrides(model: str | None, loss: str | None, epochs: int | None) -> list[str]:
    """Return the short options as ``--set`` takes them."""
    shortcuts = {"model.factory": model, "loss.factory": loss, "training.epochs": epochs}
    return [f"{key}={json.dumps(value)}" for key, value in shortcuts.items() if value is not None]

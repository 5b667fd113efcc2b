"""`dtrain train` and `dtrain launch`: they start a training, or a program of a user's own, on the cluster and follow
it; Ctrl-C cancels it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from dtrain_dagster.cli.ceilings import promising
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
from dtrain_dagster.cli.follow import follow_training, print_lines, stream_job
from dtrain_dagster.cli.job_options import (
    Asked,
    as_begun,
    nodes_option,
    order_script,
    processes_option,
    runnable,
    say_what_is_wrong,
    script_to_go_on,
    training_options,
    try_to_keep_script,
    with_reachable_data,
)
from dtrain_dagster.cli.plan_lines import expect, expect_nodes
from dtrain_dagster.cli.screen import pairs_table
from dtrain_dagster.cli.start import (
    How,
    finish,
    new_job_id,
    provision,
    runs_already,
    start_and_follow,
    start_options,
    take_over,
    this_command,
)
from dtrain_dagster.cli.tracking import (
    refuse_unregistrable,
    track,
    try_to_record_end,
    try_to_register,
    unregistered_job,
)
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.jobs.log_follower import follow_logs
from dtrain_dagster.jobs.program import describe_needs, has_gpus, order_program, processes_of, refuse_program
from dtrain_dagster.jobs.start import spec_of, start_job
from dtrain_dagster.settings.cluster_kinds import tier_of
from dtrain_dagster.settings.engines import engine_gpus
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.support.user_sources import ensure_importable
from trainer.config import JobConfig
from trainer.frameworks.catalogue import FRAMEWORKS
from trainer.rundir import RunDir


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
    own, command = asked.fields(backend), None
    if script is not None:
        asked.refuse_beside_script(settings=settings_file)
        found = order_script(settings, script, arguments, [*own, *changes], asked.nodes, name)
        job, nodes, command = found.job, asked.nodes or settings.nodes, found.command
        runs = runs_already(manager_of(settings), job.job_id)
    elif arguments:
        raise click.UsageError(f"arguments belong to a --script: {arguments[0]}", click.get_current_context())
    else:
        job, nodes, runs = _plan(settings, asked, own, settings_file, name)
    size = f" --procs-per-node {asked.procs_per_node}" if asked.procs_per_node else ""
    go_on = f"go on: dtrain train --name {job.job_id} --nodes {nodes}{size}"
    _train(settings, job, nodes, runs, command, go_on, own, changes, how)


def _plan(
    settings: Settings, asked: Asked, own: Sequence[str], settings_file: str | None, name: str | None
) -> tuple[JobConfig, int, bool]:
    """Return the training that the options describe, its nodes, and whether it runs already. Raise as
    `say_what_is_wrong` does."""
    job_id = new_job_id(name, "train") if name or asked.dataset else None
    if job_id and not (asked.config or asked.dataset) and run_dir(settings, job_id).storage.exists("job.json"):
        asked = replace(asked, config=f"{run_dir(settings, job_id).uri}/job.json")  # it goes on as it was planned
    with asked.in_its_words():
        job, nodes = asked.job(settings, own, job_id, settings_file)
        rundir = run_dir(settings, new_job_id(job.job_id, "train"))
        if not (runs := runs_already(manager_of(settings), job.job_id)):
            say_what_is_wrong(job, nodes, settings, rehearses=not rundir.storage.exists("job.json"))
    return job, nodes, runs


def _train(
    settings: Settings,
    job: JobConfig,
    nodes: int,
    runs: bool,
    command: tuple[str, ...] | None,
    go_on: str,
    own: Sequence[str],
    changes: Sequence[str],
    how: How,
) -> None:
    """Run a training on the cluster, follow it, and exit as it ends; or only show what would be submitted. ``runs``:
    whether it does already; ``command``: of a script, what each process runs; ``own``: the overrides of the command;
    ``changes``: see `dtrain_dagster.cli.job_options.as_begun`."""
    cluster, project = cluster_of(settings)
    manager, job_id, ranks, rundir = cluster.manager(tends=True), job.job_id, ranks_of(settings), RunDir(job.run_dir)
    # of a script without its arguments, in which it may take a token
    tracked = track(job, own, settings, cluster, project, Path(command[1]).name if command else "dtrain train")
    job = tracked.job if command else with_reachable_data(tracked.job, settings, copies=not how.is_dry)
    job, env, keep = as_begun(job, runs, changes), cluster.node_env(project) | tracked.env, how.keep_failed_seconds
    if command is None:
        ensure_importable()  # for a manager that sends a user's modules to its nodes
    if not runs:
        expected = expect(settings, job, nodes)
        say(*expected.lines(), err=True)
    if how.is_dry and not runs:
        spec = spec_of(manager, job, nodes, ranks, env, command, keep)
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
            stack.enter_context(promising(settings, expected.wanted(job_id)))
            got = provision(manager, nodes, cluster.sku)
            if got.gpu_type != cluster.sku or got.tier not in (None, settings.tiers[0]):  # at another price
                expected = expected.on(price_of(got.gpu_type), tier_of(got.tier or settings.tiers[0]))
                say(*expected.lines(), err=True)
                stack.enter_context(promising(settings, expected.wanted(job_id)))
        take_over(rundir)

        def begin() -> None:
            start_job(manager, job, nodes, ranks, env, command=command, keep_failed_seconds=keep)
            if command and not runs:
                try_to_keep_script(settings, job_id, command, [*own, *changes], nodes, ranks)

        follow = partial(follow_training, settings, job_id)
        detach = f"dtrain status {job_id} --follow" if how.detach else ""
        status = start_and_follow(settings, manager, job_id, begin, follow, go_on, detach)
    if status is None:
        return
    if status.state == "succeeded" and command is None:
        console().print(pairs_table(priced_summary(settings, rundir)), highlight=False)
    try_to_record_end(settings, cluster, project, tracked, rundir)
    if status.state == "succeeded" and not try_to_register(settings, cluster, project, job, rundir):
        raise SystemExit(1)
    finish(settings, rundir, status, go_on)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@nodes_option
@processes_option
@click.option(
    "--engine",
    type=click.Choice(list(FRAMEWORKS)),
    default="torchrun",
    show_default=True,
    help="What the script is written for.",
)
@click.option(
    "--master-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of rank 0.  [default: a free one]"
)
@start_options
@click.argument("command", nargs=-1, required=True, type=click.Path())
@refuses
def launch(
    nodes: int | None,
    procs_per_node: int | None,
    engine: str,
    master_port: int | None,
    command: tuple[str, ...],
    how: How,
) -> None:
    """Run a script of your own on N nodes of the cluster.

    COMMAND runs once per process with the variables that torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT and so on. With an engine, it finds those of Horovod, DeepSpeed or TensorFlow as well; for Ray it runs
    once, beside a Ray of all nodes. A path that ends in .py is run with the Python that runs dtrain. The exit code is
    that of the process that failed first, 0 if none did. Ctrl-C cancels the job.

    On SLURM, Kubernetes and Ray the script must be at the same path; to nodes of Azure ML it goes along with what it
    imports.

    \b
    Examples:
      dtrain launch --nodes 2 --procs-per-node 2 -- python my_script.py --epochs 3
      dtrain launch --engine horovod --nodes 3 --name trial-1 my_script.py
      dtrain launch --engine deepspeed -- python my_script.py --config zero3.json
      dtrain launch --engine ray --nodes 2 my_ray_train.py
      dtrain launch --detach --name night my_script.py
      dtrain launch --dry-run --nodes 2 my_script.py
    """
    settings = read_settings(procs_per_node, nodes)
    kind, node_count = settings.kind, nodes or settings.nodes
    processes = processes_of(engine, procs_per_node, ranks_of(settings))
    refuse_program(engine, kind, processes, has_gpus(kind, settings.gpu_type, engine_gpus(settings)))
    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    job_id = new_job_id(how.name, "launch")
    rundir = run_dir(settings, job_id)
    how.check(settings)
    spec = order_program(
        manager, kind, job_id, rundir.uri, engine, runnable(command) if kind.is_this_machine else command,
        node_count, processes, cluster.node_env(project), master_port,
    )  # fmt: skip
    spec = replace(spec, keep_failed_seconds=how.keep_failed_seconds)
    if runs_already(manager, job_id):
        raise Refusal(f"job {job_id} is already running: `dtrain logs --follow {job_id}` or `dtrain cancel {job_id}`")
    for note in filter(None, (FRAMEWORKS[engine].open_ports, describe_needs(kind))):
        say(f"note: {note}", err=True)
    expected = expect_nodes(settings, node_count)
    if how.is_dry:
        say(expected.price_line, err=True)
        show_dry_run(settings, manager, spec, cluster.sku, expected.wanted(job_id))
    with promising(settings, expected.wanted(job_id)):
        provision(manager, node_count, cluster.sku)
        follower = follow_logs(manager, rundir, kind.shares_home)
        if kind.shares_home:  # of launches before this one; what the cluster says is of this one alone
            follower.skip_to_end()
        take_over(rundir)
        begin = partial(manager.submit_job, spec)
        follow = partial(stream_job, partial(print_lines, console()), manager, job_id, follower)
        run_again = f"run it again: {this_command('' if how.name else job_id)}"
        detach = f"dtrain logs --follow {job_id}" if how.detach else ""
        status = start_and_follow(settings, manager, job_id, begin, follow, run_again, detach)
        if status is not None:
            finish(settings, rundir, status)

"""`dtrain launch`: a program of a user's own on the nodes of the cluster, followed to its end; Ctrl-C cancels it.

A training that the trainer knows is `dtrain_dagster.cli.train`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import click

from dtrain_dagster.cli.ceilings import promising
from dtrain_dagster.cli.common import Refusal, cluster_of, console, ranks_of, read_settings, refuses, run_dir, say
from dtrain_dagster.cli.doctor import show_dry_run
from dtrain_dagster.cli.follow import print_lines, stream_job
from dtrain_dagster.cli.job_options import runnable
from dtrain_dagster.cli.plan_lines import expect_nodes
from dtrain_dagster.cli.start import (
    How,
    finish,
    new_job_id,
    runs_already,
    start_and_follow,
    start_options,
    take_over,
    this_command_again,
)
from dtrain_dagster.cli.train import size_options
from dtrain_dagster.jobs.log_follower import follow_logs
from dtrain_dagster.jobs.program import describe_needs, has_gpus, order_program, processes_of, refuse_program
from dtrain_dagster.settings.engines import engine_gpus
from trainer.frameworks.catalogue import FRAMEWORKS


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@size_options
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
    for note in (FRAMEWORKS[engine].open_ports, describe_needs(kind)):
        if note:
            say(f"note: {note}", err=True)
    expected = expect_nodes(settings, node_count)
    if how.is_dry:
        say(expected.price_line, err=True)
        show_dry_run(settings, manager, spec, cluster.sku, expected.wanted(job_id))
    with promising(settings, expected.wanted(job_id)):
        manager.provision_cluster(node_count, cluster.sku)
        follower = follow_logs(manager, rundir, kind.shares_home)
        if kind.shares_home:  # of launches before this one; what the cluster says is of this one alone
            follower.skip_to_end()
        take_over(rundir)

        show = partial(print_lines, console())

        status = start_and_follow(
            settings,
            manager,
            job_id,
            lambda: manager.submit_job(spec),
            lambda: stream_job(show, manager, job_id, follower),
            this_command_again(job_id),
            "run it again",
            detach=f"dtrain logs --follow {job_id}" if how.detach else "",
        )
        if status is not None:
            finish(settings, rundir, status)

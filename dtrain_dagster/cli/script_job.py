"""The job of a script that calls `trainer.Trainer.fit`, ordered and run by `dtrain train --script`.

What a script trains is found out by `dtrain_dagster.jobs.script_job`. A job of ``job.json``, without a script, is
`dtrain_dagster.cli.train`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtrain_dagster.cli.common import Refusal, cluster_of, console, ranks_of, run_dir, say
from dtrain_dagster.cli.job_life import (
    announce,
    cancelled_by_signals,
    end,
    new_job_id,
    runs_already,
    say_what_was_got,
    take_over,
)
from dtrain_dagster.jobs.orders import (
    ScriptOrder,
    environment_anywhere,
    is_of_script,
    keep_script,
    script_of,
    script_trouble,
)
from dtrain_dagster.jobs.script_job import ScriptJob, describe_script
from trainer.config import JOB_ID

if TYPE_CHECKING:
    from dtrain_dagster.settings.environment import Settings


def script_to_go_on(settings: Settings, name: str | None) -> ScriptOrder | None:
    """Return how the job of this name was started, if a script trains it. The working directory becomes the script's
    while the command runs. Raise `Refusal` where it cannot be started again."""
    if not name or not JOB_ID.fullmatch(name) or not is_of_script(settings.home, name):
        return None
    order = script_of(settings.home, name)
    if order is None or script_trouble(order):
        raise Refusal(f"job {name}: {script_trouble(order)}")
    click.get_current_context().with_resource(chdir(order.folder))
    os.environ.update(environment_anywhere(os.environ, settings.home))
    return order


def refuse_with_script(options: Mapping[str, object]) -> None:
    """Raise `Refusal` for options of a job that a script has itself."""
    for option, value in options.items():
        if value is not None:
            raise Refusal(
                f"{option} cannot be combined with --script: the script has its own model, loss, data and settings"
            )


def order_script(
    settings: Settings, script: str, arguments: Sequence[str], overrides: Sequence[str], nodes: int | None,
    name: str | None,
) -> ScriptJob:  # fmt: skip
    """Return the training of a script on this many nodes. Raise `ConfigError` as `describe_script` does, and where its
    model does not fit into their memory."""
    from dtrain_dagster.clusters.ranks import have_gpus, hosts_of
    from dtrain_dagster.costs.prices import price_of
    from dtrain_dagster.jobs.program import describe_needs
    from dtrain_dagster.planning.check_job import Checked, check_memory, check_strategy
    from dtrain_dagster.planning.memory_fit import room_of
    from dtrain_dagster.settings.engines import read_engine_options

    if needs := describe_needs(settings.kind):
        say(f"note: {needs}", err=True)
    job_id = new_job_id(name, "train")
    ranks = (nodes or settings.nodes) * ranks_of(settings)
    share = max(1, (os.cpu_count() or 1) // ranks) if settings.kind.is_this_machine else None
    threads = settings.threads_per_rank or share
    own = [f"training.world_size={ranks}", *([f"training.threads_per_rank={threads}"] if threads else [])]
    found = describe_script(
        script, arguments, [*own, *overrides], job_id, f"{settings.jobs_uri}/{job_id}", option="--script"
    )
    gpus = read_engine_options(settings.cluster).get("gpus", 0) if settings.kind.has_engine else None
    price, each = price_of(settings.gpu_type), ranks_of(settings)
    room = room_of(settings.kind, price, settings.tiers[0], nodes or settings.nodes, each)
    hosts = hosts_of(settings.kind, nodes or settings.nodes)
    has_gpus = have_gpus(settings.kind, settings.gpu_type, gpus)
    said = check_strategy(found.job.training, hosts, has_gpus, settings.kind.is_this_machine)
    for sentence in (*said, *check_memory(Checked(model=found.model), found.job.training, room).sentences):
        say(sentence, err=True)
    return found


def train_script(
    settings: Settings, ordered: ScriptJob, overrides: Sequence[str], node_count: int, detach: bool,
    changes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run a script's training on the cluster, follow it, and exit as it ends. ``overrides``: those of the command,
    with which its page starts it again. ``changes``: see `dtrain_dagster.cli.job_options.as_begun`."""
    from dtrain_dagster.cli.going_on import command_again, say_how_to_go_on, typed_arguments
    from dtrain_dagster.cli.job_options import as_begun
    from dtrain_dagster.cli.terminal import watch_training
    from dtrain_dagster.cli.time_left import LeftClock, expect_finish
    from dtrain_dagster.cli.tracking import track, try_to_record_end
    from dtrain_dagster.jobs.progress import start_job

    cluster, project = cluster_of(settings)
    manager = cluster.manager(tends=True)
    rundir, job_id = run_dir(settings, ordered.job.job_id), ordered.job.job_id
    runs, is_new = runs_already(manager, job_id), not rundir.storage.exists("job.json")
    source = Path(ordered.command[1]).name  # without its arguments, in which a script may take a token
    tracked = track(ordered.job, overrides, settings, cluster, project, source)
    job = as_begun(tracked.job, runs, changes)
    if runs:
        say(f"job {job_id} is already running, so no new one is started", err=True)
    else:
        say_what_was_got(manager.provision_cluster(node_count, cluster.sku), cluster.sku)
    take_over(rundir)
    environment = cluster.node_env(project) | tracked.env
    again = command_again(typed_arguments(), job_id)
    with cancelled_by_signals(manager, job_id, unless=detach, then=lambda: say_how_to_go_on(settings, job_id, again)):
        start_job(manager, job, node_count, ranks_of(settings), environment, command=ordered.command)
        if not runs:
            try:
                fields = [*overrides, *changes]
                keep_script(settings.home, job_id, _words_of(ordered, fields, node_count, ranks_of(settings)))
            except OSError as error:  # the nodes train already
                say(f"the page of job {job_id} will not be able to resume it: {error}", err=True)
        if detach:
            say(job_id)
            say(f"follow it: dtrain watch {job_id}", err=True)
            return
        announce(rundir)
        clock = LeftClock(rundir, lambda: expect_finish(settings, rundir))
        status = watch_training(console(), manager, rundir, job_id, ordered.total_steps if is_new else None, clock)
    try_to_record_end(settings, cluster, project, tracked, rundir)
    end(settings, rundir, status, again)


def _words_of(ordered: ScriptJob, overrides: Sequence[str], node_count: int, processes_per_node: int) -> ScriptOrder:
    _, script, *arguments = ordered.command
    return ScriptOrder(
        script=script, folder=os.getcwd(), arguments=tuple(arguments), overrides=tuple(overrides), nodes=node_count,
        processes_per_node=processes_per_node,
    )  # fmt: skip

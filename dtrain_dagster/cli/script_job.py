"""The job of a script that calls `trainer.Trainer.fit`, as `dtrain train --script` and fleets order it.

What a script trains is found out by `dtrain_dagster.jobs.script_job`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import chdir
from typing import TYPE_CHECKING

import click

from dtrain_dagster.cli.common import Refusal, ranks_of, say
from dtrain_dagster.cli.start import new_job_id
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
    from dtrain_dagster.settings.engines import engine_gpus

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
    gpus = engine_gpus(settings)
    price, each = price_of(settings.gpu_type), ranks_of(settings)
    room = room_of(settings.kind, price, settings.tiers[0], nodes or settings.nodes, each)
    hosts = hosts_of(settings.kind, nodes or settings.nodes)
    has_gpus = have_gpus(settings.kind, settings.gpu_type, gpus)
    said = check_strategy(found.job.training, hosts, has_gpus, settings.kind.is_this_machine)
    for sentence in (*said, *check_memory(Checked(model=found.model), found.job.training, room).sentences):
        say(sentence, err=True)
    return found


def try_to_keep_script(
    settings: Settings, job_id: str, command: Sequence[str], fields: Sequence[str], nodes: int, processes_per_node: int
) -> None:
    """Keep the words with which the job's page starts it again. The nodes train already: where they cannot be kept, it
    is told."""
    _, script, *arguments = command
    order = ScriptOrder(
        script=script, folder=os.getcwd(), arguments=tuple(arguments), overrides=tuple(fields), nodes=nodes,
        processes_per_node=processes_per_node,
    )  # fmt: skip
    try:
        keep_script(settings.home, job_id, order)
    except OSError as error:
        say(f"the page of job {job_id} will not be able to resume it: {error}", err=True)

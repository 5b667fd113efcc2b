"""The job of a program of a user's own: its command for the nodes, and what is refused before any node is asked for.

What a command or an asset makes of it belongs to these. How a framework is started is in `trainer.frameworks`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtrain_dagster.clusters.base import GPUClusterManager, JobSpec
from dtrain_dagster.settings.cluster_kinds import ClusterKind
from trainer.config import ConfigError
from trainer.frameworks.catalogue import FRAMEWORKS, TORCHRUN, explain_missing, explain_size
from trainer.node.gpus import visible_gpus

STARTER = "trainer.frameworks"
SCRIPT_FOLDER = "DTRAIN_SCRIPT_FOLDER"
"""As `trainer.fit` reads it, which imports torch."""
RAY_IN_RAY = (
    "--engine ray on DTRAIN_CLUSTER=ray: its nodes are actors of a Ray already, and another one within them would "
    "count the same CPUs and GPUs again; give the script to that Ray (`ray job submit -- python SCRIPT`), or start it "
    "on another kind of cluster, where the job gets a Ray of its own"
)
ON_AZURE = (
    "DTRAIN_CLUSTER=azure_ml: a job there takes along the trainer and the modules of its model and loss, and its costs "
    "follow from what the trainer writes about its node; a program of your own has neither: make your model a module "
    "and start `dtrain train --model package.module:factory` (docs/own-model-and-data.md), or run the program on "
    "another kind of cluster"
)
SAME_PATH = "the script and what it imports must be at the same path on the nodes, and its packages installed there"


def explain_refusal(engine: str, kind: ClusterKind, processes_per_node: int, has_gpus: bool) -> str:
    """Return why a program of this engine cannot run on such a cluster, with the remedy; "" where it can. Pure."""
    if kind.code == "uploaded":
        return ON_AZURE
    if engine == "ray" and kind.name == "ray":
        return RAY_IN_RAY
    return explain_size(FRAMEWORKS[engine], processes_per_node, has_gpus)


def processes_of(engine: str, stated: int | None, usual: int) -> int:
    """Return the processes on each node: as stated, else one where one process of the engine takes all GPUs of a node,
    else the cluster's usual number. Pure."""
    return stated or (1 if FRAMEWORKS[engine].one_per_node else usual)


def has_gpus(kind: ClusterKind, gpu_type: str, of_engine: int | None) -> bool:
    """Return whether nodes are known to have GPUs, those of this machine included. ``of_engine``: those that an engine
    is asked for. Raise `PriceError` for an unknown SKU."""
    from dtrain_dagster.clusters.ranks import have_gpus

    return bool(visible_gpus(os.environ)) if kind.is_this_machine else have_gpus(kind, gpu_type, of_engine)


def refuse_program(engine: str, kind: ClusterKind, processes_per_node: int, has_gpus: bool) -> None:
    """Raise `ConfigError` for a program that cannot run on such a cluster, or whose packages are missing where they can
    be looked for."""
    if engine not in FRAMEWORKS:
        raise ConfigError(f"there is no engine {engine!r}; there are {', '.join(FRAMEWORKS)}")
    why = explain_refusal(engine, kind, processes_per_node, has_gpus)
    if kind.is_this_machine:
        why = why or explain_missing(FRAMEWORKS[engine])
    if why:
        raise ConfigError(why)


def command_on_nodes(command: Sequence[str], python: str) -> tuple[str, ...]:
    """Return a command as nodes of other machines run it: with their Python, and the path of a script that is here made
    absolute. Raise `ConfigError` for a script that is not here, and has no absolute path to be found there by."""
    program, *rest = command
    if program.endswith(".py"):
        program, rest = python, [program, *rest]
    elif program in ("python", "python3", sys.executable):
        program = python
    if Path(program).name.startswith("python") and rest and rest[0].endswith(".py"):
        if not Path(rest[0]).is_file() and not os.path.isabs(rest[0]):
            raise ConfigError(
                f"there is no script {rest[0]!r} in {os.getcwd()}; one that only nodes have needs its path"
            )
        rest[0] = os.path.abspath(rest[0])
    return (program, *rest)


def start_command(engine: str, command: Sequence[str], python: str, is_this_machine: bool) -> tuple[str, ...]:
    """Return what each process of a job runs: the command, with the starter of its engine before it. On other machines
    that says as well what a node lacks. Pure."""
    if engine == TORCHRUN and is_this_machine:
        return tuple(command)
    return (python, "-P", "-m", STARTER, "--engine", engine, "--", *command)


def order_program(
    manager: GPUClusterManager,
    kind: ClusterKind,
    job_id: str,
    run_dir: str,
    engine: str,
    command: Sequence[str],
    node_count: int,
    processes_per_node: int,
    env: Mapping[str, str],
    master_port: int | None = None,
) -> JobSpec:
    """Return the job of a program. ``command``: as it runs on this machine. Raise `ConfigError` as `command_on_nodes`
    does."""
    here = kind.is_this_machine
    found = tuple(command) if here else command_on_nodes(command, manager.python)
    return JobSpec(
        job_id=job_id,
        run_dir=run_dir,
        command=start_command(engine, found, sys.executable if here else manager.python, here),
        node_count=node_count,
        processes_per_node=processes_per_node,
        env={**env, SCRIPT_FOLDER: run_dir},
        master_port=master_port,
    )

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
from trainer.rundir import SCRIPT_FOLDER

STARTER = "trainer.frameworks"
RAY_IN_RAY = (
    "--engine ray on DTRAIN_CLUSTER=ray: its nodes are already actors of a Ray cluster, and another Ray within them "
    "would count the same CPUs and GPUs again; give the script to that Ray (`ray job submit -- python SCRIPT`), or "
    "start it on another kind of cluster, where the job gets a Ray of its own"
)
NO_SCRIPT = (
    "DTRAIN_CLUSTER=azure_ml: the command must be a Python script on this machine, which is sent along with what it "
    "imports: `dtrain launch -- python my_script.py …`"
)
IN_IMAGE = (
    "the script and what it imports are sent along; the packages that it needs must be in the image "
    "(DTRAIN_AZURE_IMAGE)"
)
SAME_PATH = "the script and what it imports must be at the same path on the nodes, and its packages installed there"


def explain_refusal(engine: str, kind: ClusterKind, processes_per_node: int, has_gpus: bool) -> str:
    """Return why a program of this engine cannot run on such a cluster, with the remedy; "" where it can. Pure."""
    if engine == "ray" and kind.name == "ray":
        return RAY_IN_RAY
    return explain_size(FRAMEWORKS[engine], processes_per_node, has_gpus)


def processes_of(engine: str, stated: int | None, usual: int) -> int:
    """Return the processes on each node: as stated, one where one takes all GPUs, else the usual number. Pure."""
    return stated or (1 if FRAMEWORKS[engine].one_per_node else usual)


def has_gpus(kind: ClusterKind, gpu_type: str, of_engine: int | None) -> bool:
    """Return whether nodes, or this machine, have GPUs; ``of_engine`` as asked. Raise `PriceError`."""
    from dtrain_dagster.clusters.ranks import have_gpus

    return bool(visible_gpus(os.environ)) if kind.is_this_machine else have_gpus(kind, gpu_type, of_engine)


def refuse_program(engine: str, kind: ClusterKind, processes_per_node: int, has_gpus: bool) -> None:
    """Raise `ConfigError` for a program that cannot run on such a cluster, or whose packages are missing."""
    if engine not in FRAMEWORKS:
        raise ConfigError(f"there is no engine {engine!r}; choose one of {', '.join(FRAMEWORKS)}")
    why = explain_refusal(engine, kind, processes_per_node, has_gpus)
    if kind.is_this_machine:
        why = why or explain_missing(FRAMEWORKS[engine])
    if why:
        raise ConfigError(why)


def describe_needs(kind: ClusterKind) -> str:
    """Return what nodes of a kind of cluster must have of a program, in words; "" where they are this machine. Pure."""
    if kind.is_this_machine:
        return ""
    return IN_IMAGE if kind.code == "uploaded" else SAME_PATH


def command_on_nodes(command: Sequence[str], python: str, goes_along: bool = False) -> tuple[tuple[str, ...], str]:
    """Return a command as nodes of other machines run it, with their Python, and the path of the script that goes along
    with it: none without ``goes_along``. Raise
    `ConfigError` for a script that is not here, and has no absolute path to be found there by."""
    program, *rest = command
    if program.endswith(".py"):
        program, rest = python, [program, *rest]
    elif program in ("python", "python3", sys.executable):
        program = python
    has_script = Path(program).name.startswith("python") and bool(rest) and rest[0].endswith(".py")
    if goes_along and not has_script:
        raise ConfigError(NO_SCRIPT)
    if not has_script:
        return (program, *rest), ""
    script = os.path.abspath(rest[0])
    if not Path(script).is_file() and (goes_along or not os.path.isabs(rest[0])):
        raise ConfigError(
            f"there is no script {rest[0]!r} in {os.getcwd()}; give the path of a script that only nodes have"
        )
    rest[0] = os.path.basename(script) if goes_along else script
    return (program, *rest), script if goes_along else ""


def start_command(engine: str, command: Sequence[str], python: str, kind: ClusterKind) -> tuple[str, ...]:
    """Return what each process of a job runs: the command, with the starter of its engine before it. On other machines
    that says as well what a node lacks, and records presence where nodes do so themselves. Pure."""
    if engine == TORCHRUN and kind.is_this_machine:
        return tuple(command)
    # The code that goes along is in the working directory of a node; elsewhere that folder is anybody's.
    safe = () if kind.code == "uploaded" else ("-P",)
    return (python, *safe, "-m", STARTER, "--engine", engine, "--", *command)


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
    """Return the job of a program. ``command``: as it runs here. Raise `ConfigError` as `command_on_nodes` does."""
    here = kind.is_this_machine
    along = kind.code == "uploaded"
    found, script = (tuple(command), "") if here else command_on_nodes(command, manager.python, along)
    return JobSpec(
        job_id=job_id,
        run_dir=run_dir,
        command=start_command(engine, found, sys.executable if here else manager.python, kind),
        node_count=node_count,
        processes_per_node=processes_per_node,
        env={**env, SCRIPT_FOLDER: run_dir},
        script=script,
        master_port=master_port,
    )

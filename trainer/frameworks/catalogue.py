"""The frameworks whose programs can be started: their packages, how these are installed, and which sizes make sense.

Pure facts, which both sides of the border read. How a framework is started is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.runtime.packages import is_installed
from trainer.strategies import REMEDIES

TORCHRUN = "torchrun"
"""No framework: the program finds torchrun's variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """What a framework is and needs. The fields are facts, not settings."""

    name: str
    words: str
    """What people call it."""
    package: str = ""
    """The module that its program imports; empty where there is none to look for."""
    remedy: str = ""
    """How that is installed."""
    one_per_node: bool = False
    """Whether one process of it takes all GPUs of a node."""
    runs_once: bool = False
    """Whether its program runs once, on the first node, and not once per rank."""
    serves: bool = False
    """Whether the process that starts its first rank serves the others while the program runs."""
    open_ports: str = ""
    """What of it listens beyond loopback even where all nodes are on this machine; empty where nothing does."""


_EXTRA = "pip install 'dtrain[frameworks]' (`make test-engines` makes an environment of it)"
FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(name=TORCHRUN, words="torchrun"),
        Framework(name="horovod", words="Horovod", package="horovod", serves=True, remedy=REMEDIES["horovod"]),
        Framework(name="deepspeed", words="DeepSpeed", package="deepspeed", remedy=REMEDIES["deepspeed"]),
        Framework(name="ray", words="Ray Train", package="ray.train", remedy=_EXTRA, one_per_node=True, runs_once=True),
        Framework(
            name="tensorflow",
            words="TensorFlow",
            package="tensorflow",
            remedy=_EXTRA,
            one_per_node=True,
            open_ports="the server of each of TensorFlow's workers listens on all addresses of its node and trusts "
            "whoever connects, and no setting changes that: keep its ports behind a firewall",
        ),
    )
}
"""Name of an engine, as ``--engine`` takes it → what it is."""


def explain_missing(framework: Framework, is_there: Callable[[str], bool] = is_installed) -> str:
    """Return what is missing for a framework's programs and how it is installed; "" where nothing is."""
    if not framework.package or is_there(framework.package):
        return ""
    return f"--engine {framework.name} needs the package {framework.package}, which is not there: {framework.remedy}"


def explain_size(framework: Framework, processes_per_node: int, has_gpus: bool) -> str:
    """Return why a framework cannot run this many processes on each node, with the remedy; "" where it can. Pure."""
    if not framework.one_per_node or processes_per_node == 1:
        return ""
    if framework.runs_once:
        return (
            f"--engine {framework.name} runs one process of dtrain on each node, and Ray's own workers within it: "
            "leave out --procs-per-node, and give the number of workers in the script (ScalingConfig)"
        )
    if has_gpus:
        return (
            f"--engine {framework.name} with {processes_per_node} processes on each node: each would take all GPUs of "
            "its node; give --procs-per-node 1, a process of MultiWorkerMirroredStrategy uses all of them"
        )
    return ""

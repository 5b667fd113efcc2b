"""Horovod over gloo: its variables from torchrun's, and the server at rank 0 through which its ranks find each other.

Horovod's own server trusts everybody who reaches its port. It is bound to loopback where all ranks are on this machine,
and otherwise to the address that the other nodes know.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import trainer
from trainer.comm.horovod_env import horovod_variables, node_name
from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import interface_of, own_address
from trainer.errors import ConfigError
from trainer.frameworks.meeting import Meeting, bind_address
from trainer.runtime.parent_death import die_with

SERVER = "trainer.frameworks.horovod_server"


def hosts(facts: RankFacts) -> str:
    """Return the nodes and their ranks as Horovod's server takes them. Pure."""
    per_node = facts.local_world_size
    return ",".join(f"{node_name(node)}:{per_node}" for node in range(facts.world_size // per_node))


def prepare(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to run a rank with; at rank 0, the server runs from here on until this process ends."""
    interface = interface_of(own_address(environment, facts.master_addr))
    port = start_server(bind_address(facts, environment), hosts(facts)) if facts.rank == 0 else 0
    told = meeting.gather(str(port))
    nodes = [rank // facts.local_world_size for rank in range(facts.world_size)]
    return horovod_variables(facts.rank, nodes, (facts.master_addr, int(told[0])), interface)


def start_server(address: str, plan: str) -> int:
    """Start the rendezvous server as a process that the kernel kills with this one, and return its port. Raise
    `ConfigError` where it does not start."""
    command = [sys.executable, "-P", "-m", SERVER, address, plan, str(os.getpid())]
    # The folder that this package is in: on Azure ML it is the working folder, which ``-P`` leaves out.
    paths = [str(Path(trainer.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # This process becomes the user's program, and keeps its number and its thread: the server ends with that.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=partial(die_with, os.getpid()),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.strip().isdecimal():
        raise ConfigError(f"Horovod's rendezvous server does not start (exit code {server.wait()}); see above")
    return int(line)

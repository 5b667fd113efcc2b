"""Horovod over gloo: its variables from torchrun's, and the server at rank 0 through which its ranks find each other.

Horovod's own server trusts everybody who reaches its port. It is bound to loopback where all ranks are on this machine,
and otherwise to the address that the other nodes know.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import psutil

from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import own_address
from trainer.errors import ConfigError
from trainer.frameworks.meeting import Meeting, bind_address
from trainer.runtime.parent_death import die_with

SERVER = "trainer.frameworks.horovod_server"


def variables(facts: RankFacts, server: tuple[str, int], interface: str) -> dict[str, str]:
    """Return the variables of one rank. ``server``: address and port of the rendezvous; ``interface``: the name of the
    network interface that connects the ranks. All nodes have equally many ranks. Pure."""
    per_node = facts.local_world_size
    return {
        "HOROVOD_RANK": str(facts.rank),
        "HOROVOD_SIZE": str(facts.world_size),
        "HOROVOD_LOCAL_RANK": str(facts.local_rank),
        "HOROVOD_LOCAL_SIZE": str(per_node),
        "HOROVOD_CROSS_RANK": str(facts.node_rank),
        "HOROVOD_CROSS_SIZE": str(facts.world_size // per_node),
        "HOROVOD_HOSTNAME": host_name(facts.node_rank),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server[1]),
        "HOROVOD_GLOO_IFACE": interface,
    }


def host_name(node_rank: int) -> str:
    """Return the name by which Horovod tells a node from the others; it is no address. Pure."""
    return f"node-{node_rank}"


def hosts(facts: RankFacts) -> str:
    """Return the nodes and their ranks as Horovod's server takes them. Pure."""
    per_node = facts.local_world_size
    return ",".join(f"{host_name(node)}:{per_node}" for node in range(facts.world_size // per_node))


def interface_of(address: str, interfaces: Mapping[str, list[str]]) -> str:
    """Return the name of the interface with an address. Raise `ConfigError` where none has it. Pure."""
    for name, addresses in interfaces.items():
        if address in addresses:
            return name
    raise ConfigError(
        f"no interface of this host has the address {address}, at which other nodes are told to reach it: set "
        f"DTRAIN_INTERFACE to one of {', '.join(sorted(interfaces))}"
    )


def prepare(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to run a rank with; at rank 0, the server runs from here on until this process ends."""
    mine = own_address(environment, facts.master_addr)
    found = {name: [one.address for one in addresses] for name, addresses in psutil.net_if_addrs().items()}
    interface = interface_of(mine if ":" in mine else socket.gethostbyname(mine), found)
    port = start_server(bind_address(facts, environment), hosts(facts)) if facts.rank == 0 else 0
    told = meeting.gather(str(port))
    return variables(facts, (facts.master_addr, int(told[0])), interface)


def start_server(address: str, plan: str) -> int:
    """Start the rendezvous server as a process that the kernel kills with this one, and return its port. Raise
    `ConfigError` where it does not start."""
    command = [sys.executable, "-P", "-m", SERVER, address, plan, str(os.getpid())]
    # This process becomes the user's program, and keeps its number and its thread: the server ends with that.
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=partial(die_with, os.getpid())
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line.strip().isdecimal():
        raise ConfigError(f"Horovod's rendezvous server does not start (exit code {server.wait()}); see above")
    return int(line)

"""Horovod over gloo: its variables from torchrun's, and the server at rank 0 through which its ranks find each other.

Horovod's own server trusts everybody who reaches its port. It is bound to loopback where all ranks are on this machine,
and otherwise to the address that the other nodes know. Rank 0's starter serves for as long as its program runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.comm.horovod import horovod_variables, node_name, serve_rendezvous
from trainer.comm.launcher_env import RankFacts
from trainer.comm.own_address import interface_of, own_address
from trainer.frameworks.meeting import Meeting, bind_address


def hosts(facts: RankFacts) -> str:
    """Return the nodes and their ranks as Horovod's server takes them. Pure."""
    per_node = facts.local_world_size
    return ",".join(f"{node_name(node)}:{per_node}" for node in range(facts.world_size // per_node))


def prepare(facts: RankFacts, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to run a rank with; at rank 0, the server runs from here on until this process ends."""
    interface = interface_of(own_address(environment, facts.master_addr))
    port = _serve(facts, environment).server_address[1] if facts.rank == 0 else 0
    told = meeting.gather(str(port))
    nodes = [rank // facts.local_world_size for rank in range(facts.world_size)]
    return horovod_variables(facts.rank, nodes, (facts.master_addr, int(told[0])), interface)


def _serve(facts: RankFacts, environment: Mapping[str, str]) -> Any:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    server = serve_rendezvous(bind_address(facts, environment))
    # It forgets what ranks have said only when so many have read it.
    server.init(get_host_assignments(parse_hosts(hosts(facts)), facts.world_size))
    return server

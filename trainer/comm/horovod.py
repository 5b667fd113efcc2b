"""What Horovod's ranks need to find each other: the variables that it reads, and the small web server that they ask.

Neither that server nor Horovod's connections are encrypted or authenticated. A program of a user's own gets them from
`trainer.frameworks.horovod`, a training with the strategy ``horovod`` from `trainer.parallel.horovod_synchronizer`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any


def serve_rendezvous(address: str) -> Any:
    """Return a server for Horovod's rendezvous that listens at this address only, on threads of this process."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="Horovod's rendezvous", daemon=True).start()
    return server


def horovod_variables(
    rank: int, nodes: Sequence[int], server: tuple[str, int], interface: str, world: str = ""
) -> dict[str, str]:
    """Return the variables of a rank. ``nodes``: the node of each rank; ``server``: address and port of rank 0's
    rendezvous; ``interface``: the network interface that connects this rank to the others; ``world``: what tells this
    world from others that the same nodes have formed."""
    node = nodes[rank]
    here = [other for other, its in enumerate(nodes) if its == node]
    place = here.index(rank)
    # Its cross communicator: of each node that has so many ranks, the one at this place.
    across = [its for its in sorted(set(nodes)) if nodes.count(its) > place]
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(nodes)),
        "HOROVOD_LOCAL_RANK": str(place),
        "HOROVOD_LOCAL_SIZE": str(len(here)),
        "HOROVOD_CROSS_RANK": str(across.index(node)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_HOSTNAME": world + node_name(node),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server[1]),
        "HOROVOD_GLOO_IFACE": interface,
    }


def node_name(node: int) -> str:
    """Return the name by which Horovod tells a node from the others; it is no address."""
    return f"node-{node}"

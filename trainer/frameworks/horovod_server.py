"""The process of Horovod's rendezvous server: ``python -m trainer.frameworks.horovod_server ADDRESS HOSTS PARENT``.

It binds to one address, where Horovod's own class would to all, prints its port, and serves until its parent ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

POLL_SECONDS = 1.0


def main(arguments: Sequence[str]) -> int:
    """Serve until the parent ends."""
    address, plan, parent = arguments[0], arguments[1], int(arguments[2])
    # A job that is asked to end has its ranks write checkpoints first, which may need each other.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    nodes = parse_hosts(plan)
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    server.init(get_host_assignments(nodes, sum(node.slots for node in nodes)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    while os.getppid() == parent:  # where the kernel does not end this process with it
        time.sleep(POLL_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

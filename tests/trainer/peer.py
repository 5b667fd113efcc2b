"""A member to watch, as a process of its own: ``peer.py NAME TOKEN INTERVAL TIMEOUT``.

Prints its address, then a line whenever something changes. Reads commands, one a line: ``{"follow": {name: address}}``
and ``{"tell": message}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trainer.elastic.failure_detector import FailureDetector


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(name: str, token: str, interval: float, timeout: float) -> None:
    def changed() -> None:
        say({"view": peers.statuses(), "messages": peers.take_messages()})

    peers = FailureDetector(name, token.encode(), "127.0.0.1", interval, timeout, on_change=changed)
    say(peers.address)
    for line in sys.stdin:
        command = json.loads(line)
        if "follow" in command:
            peers.follow({member: tuple(address) for member, address in command["follow"].items()})
        if "tell" in command:
            peers.broadcast(command["tell"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))

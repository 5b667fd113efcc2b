"""A stranger on the same host: a process of another user, without the secret of a launch, that carries out orders.

Tests give the orders and judge the answers.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.comm.handshake import PROOF_BYTES

NOBODY = 65534
"""User id of the stranger, where this process may choose it."""

# The stranger's program: it imports, gives up its rights, and then carries out orders, each a line of JSON.
# It knows what every user of a host can know: ports, job ids, names of members, and this source.
_STRANGER = r"""
import encodings.idna, json, os, resource, secrets, socket, struct, sys
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []

def knock(port):
    connection = socket.create_connection(("127.0.0.1", port), timeout=0.2)
    connection.settimeout(0.15)
    return connection

def hear(connection, size):
    said = b""
    try:
        while len(said) < size:
            part = connection.recv(size - len(said))
            if not part:
                break
            said += part
    except OSError:
        pass
    return said

def hello(order):
    # A handshake without the key: what comes after it would be meant for somebody who has it.
    answers = []
    for port in order["ports"]:
        for name in order["names"]:
            for how in ("made up", "reflected", "recorded", "cut", "too much"):
                try:
                    with knock(port) as connection:
                        connection.sendall(struct.pack("!4s32s64s", b"dtA1", secrets.token_bytes(32), name.encode()))
                        reply = hear(connection, 68)
                        if len(reply) < 68:
                            continue
                        proof = {"made up": secrets.token_bytes(32), "reflected": reply[36:], "cut": b"x" * 7,
                                 "recorded": bytes.fromhex(order["recorded"]), "too much": b"x" * 100000}[how]
                        connection.sendall(proof + b"\n" * 4)
                        said = hear(connection, 200)
                except OSError:
                    continue
                if said:
                    answers.append([port, name + " " + how, said.hex()])
    return answers

def flood(order):
    opened = 0
    for number in range(order["count"]):
        try:
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", order["ports"][number % len(order["ports"])]))
            held.append(connection)
            opened += 1
        except OSError:
            break
    return opened

def numbers(order):
    # Gloo's first word is the number of a pair.
    for port in order["ports"]:
        for number in range(order["ranks"] + 1):
            try:
                connection = knock(port)
                connection.sendall(struct.pack("<q", number))
                held.append(connection)
            except OSError:
                break  # nobody listens there any more
    return len(held)

def read(order):
    try:
        with open(order["path"]) as file:
            return file.read()
    except OSError as error:
        return None

def drop(order):
    while held:
        held.pop().close()

print(json.dumps(os.geteuid()), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    print(json.dumps(globals()[order["do"]](order)), flush=True)
"""


class Stranger:
    """A process of another user (where this one may choose), which can reach ports and has no secret."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _STRANGER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.user = self._hear()

    def does(self, what: str, **order: Any) -> Any:
        """Carry out an order, and return its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **order}) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def stranger() -> Iterator[Stranger]:
    """Yield a stranger whose process ends with the block."""
    made = Stranger()
    try:
        yield made
    finally:
        made.close()


def besiege(who: Stranger, ports: Sequence[int], names: Sequence[str], connections: int = 2000) -> list[Any]:
    """Make the stranger try everything at these ports, and return the answers that it got. Its connections stay
    open."""
    if not ports:
        return []
    found = who.does("hello", ports=ports, names=names, recorded="ab" * PROOF_BYTES)
    who.does("numbers", ports=ports, ranks=3)
    who.does("flood", ports=ports, count=connections)
    return found
